"""Terms of the objective beyond the policy loss: ECHO's, the weighted divergence, bypass."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch_backend_kit import backend, gradient, sample, samples, save_model

from learner.algorithm.samples import TrainSample
from learner.backends.models.batch import TokenBatch, collate_samples
from learner.backends.objective import PolicyObjective, observation_losses
from learner.config import AlgorithmSection, RejectionSection

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


def batch_of(num: int) -> TokenBatch:
    """One sequence of ``num`` trained tokens with advantage 1, sampled at logprob -1."""
    zeros = torch.zeros(num, dtype=torch.long)
    return TokenBatch(
        input_ids=zeros[None],
        predictors=zeros,
        targets=zeros,
        sequence=zeros,
        rollout_logprobs=torch.full((num,), -1.0),
        advantages=torch.ones(num),
        temperature=None,
        num_rows=1,
        versions=zeros,
        proximal_logprobs=torch.full((num,), -9.0),
    )


def objective(batch: TokenBatch, ratios: list[float], **settings: Any) -> float:
    algorithm = AlgorithmSection(loss_agg_mode="seq-mean-token-sum", **settings)
    logprobs = batch.rollout_logprobs + torch.tensor(ratios).log()
    zeros = torch.zeros(len(ratios))
    total, _ = PolicyObjective(algorithm)(batch, logprobs, zeros, None, kl_coef=0.0, version=0)
    return total.item()


def test_bypass_by_hand() -> None:
    # Ratios to β 2, 1.1, 1; the proximal logprobs of -9 are not read. Above 1.5 is rejected: what is
    # left is PPO's -1.1 and -1.
    rejections = [RejectionSection(level="token", high=1.5)]
    ratios = [2.0, 1.1, 1.0]
    found = objective(
        batch_of(3),
        ratios,
        correction="composed",
        correction_level="none",
        rejections=rejections,
        bypass=True,
    )
    assert found == pytest.approx(-2.1)
    # A weight besides a loss with a ratio would count twice: it is dropped.
    weighed = objective(
        batch_of(3), ratios, correction="composed", rejections=rejections, bypass=True
    )
    assert weighed == pytest.approx(-2.1)


def test_bypass_weighs_losses_without_a_ratio() -> None:
    # -min(r, 1.5) log p at logprobs -1 + ln r: 1.5 (1 - ln 2) + (1 - 0).
    found = objective(
        batch_of(2),
        [2.0, 1.0],
        pg_variant="reinforce",
        correction="tis",
        correction_high=1.5,
        bypass=True,
    )
    assert found == pytest.approx(1.5 * (1 - math.log(2)) + 1.0)


def test_observation_losses_by_hand() -> None:
    # Sequence 0 saw tokens of -1 and -3: 2 on each of its two trained tokens. Sequence 1 saw nothing,
    # sequence 2 one token of -5.
    logprobs = torch.tensor([-1.0, -3.0, -5.0])
    found = observation_losses(
        logprobs, torch.tensor([0, 0, 2]), torch.tensor([0, 0, 1, 2]), num_sequences=3
    )
    assert found.tolist() == [2.0, 2.0, 0.0, 5.0]


@pytest.mark.parametrize("packed", [True, False])
def test_what_was_observed_is_what_lies_between_trained_tokens(packed: bool) -> None:
    # Trained: 2 and 5. Between them: 3 and 4; the prompt before and what follows do not count.
    mask = np.array([0, 0, 1, 0, 0, 1, 0], np.uint8)
    zeros = np.zeros(7, np.float32)
    one = TrainSample(np.arange(10, 17, dtype=np.int32), mask, zeros, mask - 1, zeros, 1, 0.0)
    assert one.observed_positions.tolist() == [3, 4]
    other = dataclasses.replace(one, loss_mask=np.array([0, 1, 1, 0, 0, 0, 0], np.uint8))
    assert other.observed_positions.tolist() == []
    batch = collate_samples([one, other], CPU, packed=packed, with_observed=True)
    assert batch.observed is not None
    assert batch.observed.targets.tolist() == [13, 14]
    assert batch.observed.sequence.tolist() == [0, 0]
    wide = batch.with_observed()
    assert wide.targets.tolist() == [12, 15, 11, 12, 13, 14]
    read = wide.input_ids.flatten()[wide.predictors]
    assert read.tolist() == [11, 14, 10, 11, 12, 13]
    assert collate_samples([one, other], CPU).observed is None


def plain_echo(model: torch.nn.Module, rows: list[TrainSample]) -> tuple[torch.Tensor, float]:
    """Sum over rows of the mean cross-entropy of what they observed, and the mean over its tokens."""
    means = []
    everything = []
    for one in rows:
        ids = torch.tensor(one.token_ids.astype(np.int64))
        first, last = int(one.positions[0]), int(one.positions[-1])
        at = torch.tensor([i for i in range(first, last) if not one.loss_mask[i]], dtype=torch.long)
        if len(at):
            logprobs = model(input_ids=ids[None]).logits[0].log_softmax(-1)
            losses = -logprobs[at - 1, ids[at]]
            means.append(losses.mean())
            everything.append(losses)
    return torch.stack(means).sum(), torch.cat(everything).mean().item()


def test_echo_is_the_formula_and_reaches_samples_without_an_advantage(path: str) -> None:
    rows = samples(5, advantage=0.0)
    algorithm = AlgorithmSection(echo_coef=0.3, loss_agg_mode="seq-mean-token-mean")
    trainer = backend(path, algorithm=algorithm)
    trainer.forward_backward(rows[:4])
    trainer.forward_backward(rows[4:])
    model = backend(path).policy.module
    total, mean = plain_echo(model, rows)
    expected = torch.cat(
        [g.flatten() for g in torch.autograd.grad(0.3 * total, list(model.parameters()))]
    )
    found = gradient(trainer)
    assert float((found - expected).norm() / expected.norm()) < 1e-5
    assert trainer.step()["actor/echo_loss"] == pytest.approx(mean, rel=1e-5)


def test_echo_adds_to_the_policy_gradient(path: str) -> None:
    rows = samples(6, temperature=0.7)
    gradients = []
    for coefficient in (0.0, 0.2, 0.4):
        trainer = backend(path, algorithm=AlgorithmSection(echo_coef=coefficient))
        trainer.forward_backward(rows)
        gradients.append(gradient(trainer))
    plain, once, twice = gradients
    assert (once - plain).norm() > 1e-3
    torch.testing.assert_close(twice - once, once - plain, rtol=1e-3, atol=1e-5)


def test_selected_tokens_reach_the_loss(path: str) -> None:
    # All tokens of one of two samples are selected: Clip-Cov's gradient is the other's alone.
    rng = np.random.default_rng(8)
    rows = [sample(rng, 12), sample(rng, 15)]
    marks = [one.loss_mask * number for number, one in enumerate(rows)]
    marked = [
        dataclasses.replace(one, selected=mark) for one, mark in zip(rows, marks, strict=True)
    ]
    trainer = backend(path, algorithm=AlgorithmSection(pg_variant="clip_cov"))
    trainer.forward_backward(marked)
    alone = backend(path)
    alone.forward_backward(rows[:1])
    torch.testing.assert_close(gradient(trainer), gradient(alone), rtol=1e-4, atol=1e-6)


def test_weighted_divergence_reaches_the_loss(
    path: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rows = samples(9, advantage=0.0)
    other = save_model(tmp_path_factory.mktemp("other"), seed=1)
    plain: dict[str, Any] = {"kl_coef": 0.5, "kl_estimator": "k3"}
    metrics = []
    for importance in (False, True):
        algorithm = AlgorithmSection(**plain, kl_importance=importance)
        trainer = backend(path, algorithm=algorithm, ref_path=other)
        trainer.forward_backward(rows)
        metrics.append(trainer.step()["actor/kl_loss"])
    reference = backend(other).score(rows)
    scores = backend(path).score(rows)
    total = count = 0.0
    for one, ours, theirs in zip(rows, scores, reference, strict=True):
        d = ours.logprobs - theirs.logprobs
        ratio = np.exp(ours.logprobs - one.rollout_logprobs[one.positions])
        total += float((ratio * (np.exp(-d) - 1 + d)).sum())
        count += len(d)
    assert metrics[1] == pytest.approx(total / count, rel=1e-4)
    assert metrics[0] != pytest.approx(metrics[1], rel=1e-2)
