"""The gradient of the torch backend, against plain formulae on the same model."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch_backend_kit import backend, gradient, plain_logprobs, sample, samples, save_model
from transformers import Gemma2Config, Gemma2ForCausalLM

from learner.algorithm.aggregation import MODES
from learner.algorithm.packing import cut_micro_batches
from learner.backends.models import policy as policy_module
from learner.backends.models.batch import collate_samples
from learner.config import AlgorithmSection

CPU = torch.device("cpu")
few = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def relative(a, b):
    return float((a - b).norm() / b.norm())


def accumulated(path, batches, algorithm, scale=1.0, **rest):
    trainer = backend(path, algorithm=algorithm, **rest)
    for batch in batches:
        trainer.forward_backward(batch)
    return gradient(trainer) / scale


def reference_gradient(path, rows, algorithm):
    """Each row on its own, the loss from its definition, one backward pass; the PPO bounds and the
    means are written out here.
    """
    model = backend(path).policy.module
    sums, means, tokens = [], [], 0
    for one in rows:
        new, entropy = plain_logprobs(model, one)
        old = torch.from_numpy(one.rollout_logprobs[one.positions])
        advantages = torch.from_numpy(one.advantages[one.positions])
        r = torch.exp(new - old)
        bounded = torch.clamp(r, 1 - algorithm.clip_low, 1 + algorithm.clip_high)
        losses = (
            -torch.minimum(r * advantages, bounded * advantages) - algorithm.entropy_coef * entropy
        )
        sums.append(losses.sum())
        means.append(losses.mean())
        tokens += len(losses)
    total = {
        "token-mean": sum(sums) / tokens,
        "seq-mean-token-sum": sum(sums) / len(rows),
        "seq-mean-token-mean": sum(means) / len(rows),
        "seq-mean-token-sum-norm": sum(sums) / (len(rows) * 50),
    }[algorithm.loss_agg_mode]
    return torch.cat(
        [g.flatten() for g in torch.autograd.grad(total, list(model.parameters()))]
    ), total.item()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_and_entropies_equal_one_unpadded_row_at_a_time(path, temperature):
    trainer, rows = backend(path), samples(1, temperature=temperature)
    with torch.no_grad():
        logprobs, entropies = trainer.policy.score(collate_samples(rows, CPU))
        expected = [plain_logprobs(trainer.policy.module, one) for one in rows]
    torch.testing.assert_close(
        logprobs, torch.cat([chosen for chosen, _ in expected]), rtol=0, atol=2e-6
    )
    torch.testing.assert_close(
        entropies, torch.cat([entropy for _, entropy in expected]), rtol=0, atol=2e-6
    )


def test_each_row_keeps_its_own_temperature(path):
    trainer = backend(path)
    rows = [
        dataclasses.replace(one, temperature=t)
        for one, t in zip(samples(2, 3), (1.0, 0.5, 2.0), strict=True)
    ]
    with torch.no_grad():
        logprobs, _ = trainer.policy.score(collate_samples(rows, CPU))
        expected = torch.cat([plain_logprobs(trainer.policy.module, one)[0] for one in rows])
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("entropy_coef", [0.0, 0.03])
def test_step_equals_the_definition(path, mode, entropy_coef):
    algorithm = AlgorithmSection(
        loss_agg_mode=mode, entropy_coef=entropy_coef, clip_low=0.2, clip_high=0.28
    )
    rows = samples(3)
    expected, loss = reference_gradient(path, rows, algorithm)
    trainer = backend(path, algorithm=algorithm, max_length=50)
    for batch in cut_micro_batches(rows, 60):
        trainer.forward_backward(batch)
    raw = gradient(trainer)
    metrics = trainer.step()
    scale = {"token-mean": sum(r.num_tokens for r in rows), "seq-mean-token-sum-norm": 9 * 50}.get(
        mode, 9
    )
    assert relative(raw / scale, expected) < 1e-5
    assert metrics["actor/grad_norm"] == pytest.approx(float(expected.norm()), rel=1e-5)
    if mode == "token-mean":
        assert metrics["actor/pg_loss"] - entropy_coef * metrics["actor/entropy"] == pytest.approx(
            loss, rel=1e-5
        )


@few
@given(
    seed=st.integers(0, 99),
    mode=st.sampled_from(MODES),
    cuts=st.lists(st.integers(0, 9), max_size=5),
)
def test_the_gradient_does_not_depend_on_the_cutting(path, seed, mode, cuts):
    rows, algorithm = samples(seed), AlgorithmSection(loss_agg_mode=mode)
    edges = sorted({0, 9, *cuts})
    parts = [rows[a:b] for a, b in itertools.pairwise(edges)]
    whole = accumulated(path, [rows], algorithm, max_length=50)
    assert relative(accumulated(path, parts, algorithm, max_length=50), whole) < 1e-6


@few
@given(seed=st.integers(0, 99))
def test_nothing_in_a_masked_position_reaches_the_gradient(path, seed):
    rows = samples(seed)
    poisoned = [
        dataclasses.replace(
            one,
            rollout_logprobs=np.where(one.loss_mask, one.rollout_logprobs, np.float32("nan")),
            advantages=np.where(one.loss_mask, one.advantages, np.float32("inf")),
            versions=np.where(one.loss_mask, one.versions, 99).astype(np.int32),
        )
        for one in rows
    ]
    algorithm = AlgorithmSection()
    assert torch.equal(
        accumulated(path, [poisoned], algorithm), accumulated(path, [rows], algorithm)
    )


@few
@given(seed=st.integers(0, 99), mode=st.sampled_from(MODES))
def test_masking_the_last_tokens_equals_removing_them(path, seed, mode):
    rng = np.random.default_rng(seed)
    whole, rest = sample(rng, 24), samples(seed + 1, 3)
    keep = int(rng.integers(int(whole.positions[0]) + 1, 25))
    mask = whole.loss_mask.copy()
    mask[keep:] = 0
    masked = dataclasses.replace(whole, loss_mask=mask)
    fields = ("token_ids", "loss_mask", "rollout_logprobs", "versions", "advantages")
    removed = dataclasses.replace(whole, **{name: getattr(whole, name)[:keep] for name in fields})
    algorithm = AlgorithmSection(loss_agg_mode=mode)
    trainers = [backend(path, algorithm=algorithm, max_length=50) for _ in range(2)]
    for trainer, one in zip(trainers, (masked, removed), strict=True):
        trainer.forward_backward([one, *rest])
    assert torch.equal(gradient(trainers[0]), gradient(trainers[1]))
    assert trainers[0].step() == trainers[1].step()


def test_a_token_masked_in_the_middle_adds_nothing_but_context(path):
    # The gradient is a sum over trained tokens, so the whole minus that of one token alone is that
    # of the sample without it.
    whole = sample(np.random.default_rng(8), 20, advantage=0.7)
    middle = int(whole.positions[len(whole.positions) // 2])
    only, without = np.zeros(20, np.uint8), whole.loss_mask.copy()
    only[middle], without[middle] = 1, 0
    algorithm = AlgorithmSection()
    parts = [
        accumulated(path, [[dataclasses.replace(whole, loss_mask=m)]], algorithm)
        for m in (only, without)
    ]
    assert relative(parts[0] + parts[1], accumulated(path, [[whole]], algorithm)) < 1e-6


def test_zero_advantages_give_no_gradient_but_are_measured(path):
    rows = samples(4, advantage=0.0)
    trainer, before = backend(path), backend(path).weights()
    sums = trainer.forward_backward(rows)
    assert not gradient(trainer).any()
    metrics = trainer.step()
    assert sums["tokens"] == metrics["actor/num_tokens"] == sum(one.num_tokens for one in rows)
    assert metrics["actor/entropy"] > 1
    assert metrics["actor/grad_norm"] == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.weights().items())


def test_idle_rows_change_neither_gradient_nor_means(path):
    # Rows without advantage are measured apart from the others; the sums must not show it.
    live, idle = samples(5, 4), samples(6, 4, advantage=0.0)
    mixed = [one for pair in zip(live, idle, strict=True) for one in pair]
    trainer = backend(path)
    sums = trainer.forward_backward(mixed)
    assert relative(gradient(trainer), accumulated(path, [live], AlgorithmSection())) < 1e-6
    apart = [backend(path).forward_backward(rows) for rows in (live, idle)]
    for name in ("tokens", "rows", "inputs", "entropy", "ppo_kl", "clipped", "weight", "pg_loss"):
        assert sums[name] == pytest.approx(apart[0][name] + apart[1][name], rel=1e-5), name


def test_entropy_bonus_reaches_rows_without_advantage(path):
    assert accumulated(path, [samples(4, advantage=0.0)], AlgorithmSection(entropy_coef=0.1)).any()


def test_directional_derivative(path):
    # Finite differences of the surrogate along the gradient itself: the slope is the squared norm.
    rows = [
        dataclasses.replace(one, advantages=one.loss_mask.astype(np.float32)) for one in samples(7)
    ]
    algorithm = AlgorithmSection(pg_variant="reinforce")
    trainer = backend(path, algorithm=algorithm)
    trainer.forward_backward(rows)
    slope, step = gradient(trainer), 1e-3
    losses = []
    for sign in (1, -1):
        moved = backend(path, algorithm=algorithm)
        vector = torch.nn.utils.parameters_to_vector(moved.policy.module.parameters()).detach()
        torch.nn.utils.vector_to_parameters(
            vector + sign * step * slope / slope.norm(), moved.policy.module.parameters()
        )
        losses.append(moved.forward_backward(rows)["pg_loss"])
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(float(slope.norm()), rel=2e-3)


@pytest.mark.parametrize("entropy_coef", [0.0, 0.05])
def test_logits_in_chunks(path, monkeypatch, entropy_coef):
    rows, algorithm = samples(9), AlgorithmSection(entropy_coef=entropy_coef)
    whole = accumulated(path, [rows], algorithm)
    monkeypatch.setattr(policy_module, "_LOGIT_BUDGET", 23 * 4)  # four positions at a time
    assert relative(accumulated(path, [rows], algorithm), whole) < 1e-6


def test_a_model_that_caps_its_logits(tmp_path):
    # Gemma 2 squashes logits after the head, so the head alone would give wrong logprobs.
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=23, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16, sliding_window=8, final_logit_softcapping=2.0, query_pre_attn_scalar=16,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0, 0.3)
    model.save_pretrained(tmp_path)
    trainer, rows = backend(str(tmp_path)), samples(10)
    assert not trainer.policy._plain_head
    with torch.no_grad():
        logprobs, _ = trainer.policy.score(collate_samples(rows, CPU))
        expected = torch.cat([plain_logprobs(trainer.policy.module, one)[0] for one in rows])
        hidden = trainer.policy.module.model(input_ids=torch.tensor([[1, 2, 3]])).last_hidden_state
        assert trainer.policy.head(hidden).abs().max() > 2
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_to_the_reference(path, tmp_path, estimator):
    rows = samples(11, advantage=0.0)
    algorithm = AlgorithmSection(kl_coef=0.5, kl_estimator=estimator)
    same = backend(path, algorithm=algorithm)
    same.forward_backward(rows)
    assert same.step()["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6)

    other = save_model(tmp_path, seed=1)
    trainer = backend(path, algorithm=algorithm, ref_path=other)
    trainer.forward_backward(rows)
    found = gradient(trainer)
    model, ref = backend(path).policy.module, backend(other).policy.module
    new = torch.cat([plain_logprobs(model, one)[0] for one in rows])
    with torch.no_grad():
        old = torch.cat([plain_logprobs(ref, one)[0] for one in rows])
    d = new - old
    penalty = {"k1": d, "k2": d * d / 2, "k3": torch.exp(-d) - 1 + d}[estimator]
    expected = torch.cat(
        [g.flatten() for g in torch.autograd.grad(0.5 * penalty.sum(), list(model.parameters()))]
    )
    assert relative(found, expected) < 1e-5
    assert trainer.step()["actor/kl_loss"] == pytest.approx(
        penalty.mean().item(), rel=1e-4, abs=1e-6
    )
