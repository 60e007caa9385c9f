"""A teacher's part of advantages and loss: by hand, against plain autograd, and where it is missing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from learner_fleet import trajectory
from msgspec.structs import replace

from broker.contract import wire
from learner.algorithm.losses.teacher import (
    candidate_divergence,
    sampled_divergence,
    teacher_sums,
)
from learner.algorithm.samples import TrainSample, from_trajectory
from learner.algorithm.teaching import add_teacher, trains_divergence
from learner.backends.models.batch import collate_samples
from learner.backends.ranks.messages import pack_sample, unpack_sample
from learner.backends.step_metrics import average_metrics
from learner.config import AlgorithmSection, DistillationSection


def taught(teacher: list[float], top_k: int = 0) -> wire.Trajectory:
    """Three sampled tokens after one of the prompt, with logprobs -1, -2, -3."""
    plain = trajectory(0, 1.0, version=3, seed=1)
    scores = wire.TeacherScores(
        policy="big", version=0, logprobs=wire.column([0.0, *teacher], "<f4")
    )
    if top_k:
        ids = np.arange(3 * top_k)
        logprobs = np.log(np.full(3 * top_k, 0.5 / top_k))
        scores = replace(
            scores, top_ids=wire.column(ids, "<i4"), top_logprobs=wire.column(logprobs, "<f4")
        )
    return replace(
        plain,
        token_ids=wire.column([5, 6, 7, 8], "<i4"),
        loss_mask=wire.column([0, 1, 1, 1], "|u1"),
        logprobs=wire.column([0.0, -1.0, -2.0, -3.0], "<f4"),
        version_runs=wire.column([3, 3], "<i4"),
        turns=[replace(plain.turns[0], start=1, end=4)],
        teacher=scores,
    )


def test_the_advantage_by_hand() -> None:
    # log T - log beta is 0.5, 0 and -7, the last clipped to -5; the rewards' share is 0.25 * 2.
    section = DistillationSection(coef=2.0, reward_coef=0.25)
    advantages = add_teacher(np.array([0.0, 2.0, 2.0, 2.0]), taught([-0.5, -2.0, -10.0]), section)
    assert advantages.tolist() == [0.0, 1.5, 0.5, -9.5]
    unclipped = add_teacher(
        np.zeros(4), taught([-0.5, -2.0, -10.0]), DistillationSection(clip=None)
    )
    assert unclipped.tolist() == [0.0, 0.5, 0.0, -7.0]


def test_without_a_teacher_rewards_count_in_full() -> None:
    alone = replace(taught([-1.0, -1.0, -1.0]), teacher=None)
    advantages = np.array([0.0, 2.0, 2.0, 2.0])
    assert add_teacher(advantages, alone, DistillationSection()) is advantages
    as_loss = DistillationSection(use="loss", reward_coef=0.5)
    scored = add_teacher(advantages, taught([-1.0, -1.0, -1.0]), as_loss)
    assert scored.tolist() == [0.0, 1.0, 1.0, 1.0]
    assert trains_divergence(AlgorithmSection(distillation=as_loss))
    assert not trains_divergence(AlgorithmSection())


def test_the_sampled_divergence_has_the_gradient_of_the_reverse_divergence() -> None:
    # The expected gradient over samples of the policy, against autograd through the exact KL.
    logits = torch.tensor([0.3, -1.0, 0.7, 0.1], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64).log()
    logprobs = logits.log_softmax(-1)
    exact = (logprobs.exp() * (logprobs - teacher)).sum()
    (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)
    loss = (logprobs.detach().exp() * sampled_divergence(logprobs, teacher)).sum()
    (gradient,) = torch.autograd.grad(loss, logits)
    assert torch.allclose(gradient, expected, atol=1e-12)


def test_a_token_without_a_teacher_has_no_loss_and_no_gradient() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    teacher = torch.tensor([-3.0, math.nan])
    divergence = sampled_divergence(logprobs, teacher)
    assert divergence.tolist() == [2.0, 0.0]
    divergence.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [2.0, 0.0]
    sums = teacher_sums(teacher, logprobs)
    assert (sums["teacher_kl"].item(), sums["teacher_tokens"].item()) == (2.0, 1)


def test_the_divergence_over_candidates_by_hand() -> None:
    # Policy (1/2, 1/4, 1/4), the teacher's best token is the first, with 1/4: over (first, rest)
    # the reverse divergence is 1/2 log 2 + 1/2 log(2/3).
    logits = torch.tensor([[0.5, 0.25, 0.25]] * 2).log().requires_grad_()
    ids = torch.tensor([[0], [0]])
    top = torch.tensor([[math.log(0.25)], [math.nan]])
    divergence = candidate_divergence(logits, ids, top, "reverse")
    assert divergence[0].item() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    assert divergence[1].item() == 0.0
    divergence.sum().backward()
    assert logits.grad is not None
    assert logits.grad[1].tolist() == [0.0, 0.0, 0.0]
    assert logits.grad[0].abs().max() > 0.1


def samples(*trajectories: wire.Trajectory) -> list[TrainSample]:
    return [from_trajectory(each, np.ones(4), group=7) for each in trajectories]


def test_columns_of_a_batch_with_and_without_a_teacher() -> None:
    scored = taught([-0.5, -2.0, -10.0], top_k=2)
    batch = collate_samples(samples(scored, replace(scored, teacher=None)), torch.device("cpu"))
    assert batch.teacher_logprobs is not None
    assert batch.teacher_top_ids is not None
    assert batch.teacher_top_logprobs is not None
    assert batch.teacher_logprobs[:3].tolist() == [-0.5, -2.0, -10.0]
    assert batch.teacher_logprobs[3:].isnan().all()
    assert batch.teacher_top_ids.tolist() == [[0, 1], [2, 3], [4, 5], [0, 1], [0, 1], [0, 1]]
    assert batch.teacher_top_logprobs[:3].exp().sum(-1).tolist() == pytest.approx([0.5] * 3)
    assert batch.teacher_top_logprobs[3:].isnan().all()
    plain = collate_samples(samples(replace(scored, teacher=None)), torch.device("cpu"))
    assert plain.teacher_logprobs is None
    assert plain.teacher_top_ids is None


def test_records_from_before_a_change_of_top_k_are_cut() -> None:
    scores = [-0.5, -2.0, -10.0]
    pair = samples(taught(scores, top_k=2), taught(scores, top_k=3))
    batch = collate_samples(pair, torch.device("cpu"))
    assert batch.teacher_top_ids is not None
    assert batch.teacher_top_logprobs is not None
    assert batch.teacher_top_ids.tolist() == [[0, 1], [2, 3], [4, 5], [0, 1], [3, 4], [6, 7]]
    assert batch.teacher_top_logprobs.shape == (6, 2)


def test_an_untrained_sample_keeps_no_candidates() -> None:
    scored = taught([-0.5, -2.0, -10.0], top_k=2)
    untrained = from_trajectory(scored, np.ones(4), group=7, trained=False)
    assert untrained.teacher_top_ids is not None
    assert len(untrained.teacher_top_ids) == 0


def test_ranks_get_the_columns() -> None:
    (sample,) = samples(taught([-0.5, -2.0, -10.0], top_k=2))
    copy = unpack_sample(pack_sample(sample))
    for name in ("teacher_logprobs", "teacher_top_ids", "teacher_top_logprobs"):
        assert np.array_equal(getattr(copy, name), getattr(sample, name))
        assert getattr(copy, name).dtype == getattr(sample, name).dtype


@pytest.mark.parametrize(
    ("rows", "mean"),
    [
        ([{"teacher/kl": 1.0}, {"teacher/kl": 2.0}], 1.5),
        ([{"actor/kl": 3.0}, {"teacher/kl": 2.0}], 2.0),
    ],
)
def test_metrics_of_updates_that_lack_some(rows: list[dict[str, Any]], mean: float) -> None:
    assert average_metrics(rows, 1)["teacher/kl"] == mean
