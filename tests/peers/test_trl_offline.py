"""Preference losses and distillation against TRL on the same random tensors, values and gradients.

TRL's DPO loss is no function of its own: it stands inside ``DPOTrainer._compute_loss``, which runs
here on a stand-in for the trainer and a model that knows the logprobs already. Its KL is a static
method of the GKD trainer.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from learner.algorithm.losses.distill import distillation_kl
from learner.algorithm.losses.preference import PairLogprobs
from learner.offline import PREFERENCES

pytest.importorskip("trl", reason="make test-peers puts it beside the environment")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from trl.experimental.gkd.gkd_trainer import GKDTrainer
    from trl.trainer.dpo_trainer import DPOTrainer

from broker.settings.registry import resolve

PAIRS, LENGTH, VOCABULARY = 6, 11, 17


def theirs(loss_type, beta, logps, ref, mask):
    """TRL's loss; logps (2 P, L) with gradient, the chosen ones first, ref (2 P,), mask (2 P, L +
    1).
    """
    zeros = torch.zeros_like(logps)
    outputs = SimpleNamespace(
        log_probs=logps, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool()
    )
    same = lambda value: value  # noqa: E731
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=False), accelerator=SimpleNamespace(device="cpu", gather=same,
            gather_for_metrics=same),
        aux_loss_enabled=False, ld_alpha=None, precompute_ref_logps=True, f_divergence_type="reverse_kl",
        loss_types=[loss_type],
        loss_weights=[1.0], beta=beta, label_smoothing=0.0, use_weighting=False, _metrics={"eval": defaultdict(list)},
        _total_train_tokens=0,
    )  # fmt: skip
    chosen, rejected = ref.chunk(2)
    ids = torch.zeros_like(mask)
    inputs = {
        "input_ids": ids,
        "completion_mask": mask,
        "ref_chosen_logps": chosen,
        "ref_rejected_logps": rejected,
    }
    return DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, return_outputs=False)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("ours", "their_name"), [("dpo", "sigmoid"), ("ipo", "ipo")])
def test_preference_losses(ours, their_name, seed):
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, LENGTH + 1, (2 * PAIRS,), generator=random)
    mask = torch.cat(
        [torch.zeros(2 * PAIRS, 1), (torch.arange(LENGTH) < lengths[:, None]).double()], 1
    ).long()
    logps = (
        -torch.rand(2 * PAIRS, LENGTH, generator=random, dtype=torch.float64) * 4 * mask[:, 1:]
    ).requires_grad_()
    ref = (
        -torch.rand(2 * PAIRS, LENGTH, generator=random, dtype=torch.float64) * 4 * mask[:, 1:]
    ).sum(1)
    expected = theirs(their_name, 0.1, logps, ref, mask)
    sums = logps.sum(1)
    batch = PairLogprobs(*sums.chunk(2), *ref.chunk(2), *lengths.double().chunk(2))
    found = resolve("preferences", ours, PREFERENCES)(batch, 0.1)[0].mean()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    (a,), (b,) = (torch.autograd.grad(loss, logps, retain_graph=True) for loss in (found, expected))
    assert b.any()
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("direction", "beta"), [("forward", 0.0), ("reverse", 1.0)])
def test_divergences(direction, beta, seed):
    random = torch.Generator().manual_seed(seed)
    student = (
        torch.randn(PAIRS, LENGTH, VOCABULARY, generator=random, dtype=torch.float64)
        .mul(2)
        .requires_grad_()
    )
    teacher = torch.randn(PAIRS, LENGTH, VOCABULARY, generator=random, dtype=torch.float64) * 2
    labels = torch.where(torch.rand(PAIRS, LENGTH, generator=random) < 0.6, 1, -100)
    expected = GKDTrainer.generalized_jsd_loss(student, teacher, labels=labels, beta=beta)
    kept = labels != -100
    found = distillation_kl(
        student[kept].log_softmax(-1), teacher[kept].log_softmax(-1), direction
    ).mean()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    (a,), (b,) = (
        torch.autograd.grad(loss, student, retain_graph=True) for loss in (found, expected)
    )
    assert b.any()
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)
