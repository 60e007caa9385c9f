"""Losses against those of TRL 1.16.0 on the same random tensors; run by `make test-peers`, which
installs it beside the environment.
"""

import warnings
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from broker.settings.registry import resolve
from learner.algorithm.aggregation import BatchCounts, loss_denominator, token_weights
from learner.algorithm.corrections import CORRECTIONS
from learner.algorithm.corrections.base import CorrectionInputs
from learner.algorithm.kl import kl_penalty
from learner.algorithm.losses import LOSSES
from learner.algorithm.losses.base import LossTokens
from learner.config import AlgorithmSection

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("trl", reason="make test-peers installs it")
    grpo_trainer = pytest.importorskip(
        "trl.trainer.grpo_trainer", reason="make test-peers installs what it needs"
    )

ROWS, LENGTH, MAX_LENGTH = 6, 11, 16


class Batch:
    """Random padded rows; in the first nothing has moved, in the others the policy has, by 0.3 nats
    a token.
    """

    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        lengths = torch.randint(1, LENGTH + 1, (ROWS,), generator=generator)
        self.mask = (torch.arange(LENGTH) < lengths[:, None]).double()
        self.old = -normal(ROWS, LENGTH).abs()
        self.new = (
            self.old + 0.3 * normal(ROWS, LENGTH) * (torch.arange(ROWS) > 0)[:, None]
        ).requires_grad_()
        self.ref, self.advantages = -normal(ROWS, LENGTH).abs(), normal(ROWS)


def theirs(batch, *, loss_type, level="token", low=0.2, high=0.28, delta=None, beta=0.0, opsm=None):
    """TRL's own function on a stand-in for its trainer that knows the logprobs already."""
    entropies = torch.zeros_like(batch.mask)
    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=True
    )
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (batch.new, entropies, None),
        get_off_policy_mask=grpo_trainer.GRPOTrainer.get_off_policy_mask,
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=opsm,
        importance_sampling_level=level, beta=beta,
        loss_type=loss_type, epsilon_low=low, epsilon_high=high, use_vllm=False,
        vllm_importance_sampling_correction=False,
        args=SimpleNamespace(delta=delta, use_bias_correction_kl=False), model=SimpleNamespace(training=False),
        max_completion_length=MAX_LENGTH, accelerator=accelerator, _entropy_bonus_enabled=False,
        _metrics={"eval": defaultdict(list)},
    )  # fmt: skip
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    inputs = {
        "prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": batch.mask,
        "advantages": batch.advantages,
        "old_per_token_logps": batch.old, "ref_per_token_logps": batch.ref, "num_items_in_batch": batch.mask.sum(),
    }  # fmt: skip
    return grpo_trainer.GRPOTrainer._compute_loss(trainer, None, inputs)


def ours(batch, algorithm):
    """Flat tokens, aggregated as the backend does; the same tensors."""
    kept = batch.mask.bool()
    sequence = torch.arange(ROWS)[:, None].expand(ROWS, LENGTH)[kept]
    advantages = batch.advantages[:, None].expand(ROWS, LENGTH)[kept]
    new, old = batch.new[kept], batch.old[kept]
    correction = resolve("corrections", algorithm.correction, CORRECTIONS)(
        CorrectionInputs(new.detach(), old, old, advantages, sequence, ROWS), algorithm
    )
    losses, _ = resolve("losses", algorithm.pg_variant, LOSSES)(
        LossTokens(new, old, advantages, sequence, ROWS), algorithm
    )
    losses = correction.weights * losses
    if algorithm.kl_coef:
        losses = losses + algorithm.kl_coef * kl_penalty(new, batch.ref[kept], "k3")
    weights = token_weights(algorithm.loss_agg_mode, sequence, ROWS)
    return (weights * losses).sum() / loss_denominator(
        algorithm.loss_agg_mode, BatchCounts(len(new), ROWS), MAX_LENGTH
    )


CASES = {
    "grpo": (
        {"loss_type": "grpo", "beta": 0.04},
        {"loss_agg_mode": "seq-mean-token-mean", "kl_coef": 0.04},
    ),
    "bnpo": ({"loss_type": "bnpo"}, {"loss_agg_mode": "token-mean"}),
    "dapo": ({"loss_type": "dapo"}, {"loss_agg_mode": "token-mean"}),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {"loss_agg_mode": "seq-mean-token-sum-norm"}),
    "dual clip": ({"loss_type": "bnpo", "delta": 1.5}, {"dual_clip": 1.5}),
    "gspo": (
        {"loss_type": "grpo", "level": "sequence", "low": 0.03, "high": 0.04},
        {
            "pg_variant": "gspo",
            "clip_low": 0.03,
            "clip_high": 0.04,
            "loss_agg_mode": "seq-mean-token-mean",
        },
    ),
    # TRL's bound is the weight itself, ours the distance from 1.
    "cispo": ({"loss_type": "cispo", "high": 1.28}, {"pg_variant": "cispo", "clip_low": 1.0}),
    "opsm": ({"loss_type": "bnpo", "opsm": 0.02}, {"correction": "opsm", "opsm_delta": 0.02}),
}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", CASES)
def test_the_same_loss_and_the_same_gradient(name, seed):
    peer, settings = CASES[name]
    batch = Batch(seed)
    algorithm = AlgorithmSection(**{"clip_high": 0.28, **settings})
    expected, found = theirs(batch, **peer), ours(batch, algorithm)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    (a,), (b,) = (torch.autograd.grad(loss, batch.new) for loss in (found, expected))
    assert b.any()
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)
