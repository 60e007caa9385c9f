"""Forward and reverse KL by hand, the top-k with the rest as one, and what must hold for any
distributions.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.algorithm.losses.distill import (
    MIN_REMAINDER,
    candidate_logprobs,
    distillation_kl,
    with_rest,
)


def logs(*probabilities):
    return torch.tensor([probabilities], dtype=torch.float64).log()


def test_both_directions_by_hand():
    # Teacher (1/2, 1/2), student (3/4, 1/4). Forward: 1/2 log(2/3) + 1/2 log 2 = 1/2 log(4/3) =
    # 0.1438410362. Reverse: 3/4 log(3/2) + 1/4 log(1/2) = 0.1308121047.
    student, teacher = logs(0.75, 0.25), logs(0.5, 0.5)
    assert distillation_kl(student, teacher, "forward").item() == pytest.approx(
        0.5 * math.log(4 / 3)
    )
    assert distillation_kl(student, teacher, "reverse").item() == pytest.approx(
        0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    )


def test_the_slope_of_forward_kl_by_hand():
    # d KL(t || s) / d logit = s - t: (3/4 - 1/2, 1/4 - 1/2).
    logits = logs(0.75, 0.25).requires_grad_()
    (slope,) = torch.autograd.grad(
        distillation_kl(logits.log_softmax(-1), logs(0.5, 0.5), "forward").sum(), logits
    )
    assert slope[0].tolist() == pytest.approx([0.25, -0.25])


def test_top_k_by_hand():
    # Teacher (0.5, 0.3, 0.1, 0.1), student (0.25, 0.25, 0.4, 0.1), k = 2: outcomes 0.5, 0.3 and the
    # rest 0.2 against 0.25, 0.25, 0.5. Forward: 0.5 log 2 + 0.3 log 1.2 + 0.2 log 0.4 =
    # 0.3465735903 + 0.0546964670 - 0.1832581464 = 0.2180119109.
    ids = torch.tensor([[0, 1]])
    student = candidate_logprobs(logs(0.25, 0.25, 0.4, 0.1), ids)
    assert student.exp()[0].tolist() == pytest.approx([0.25, 0.25, 0.5])
    teacher = with_rest(logs(0.5, 0.3))
    assert teacher.exp()[0].tolist() == pytest.approx([0.5, 0.3, 0.2])
    assert distillation_kl(student, teacher, "forward").item() == pytest.approx(
        0.5 * math.log(2) + 0.3 * math.log(1.2) + 0.2 * math.log(0.4)
    )


def test_a_teacher_without_a_rest_leaves_a_little():
    # Rounding may let float32 probabilities add up to 1 or more; the rest is then 1e-6, so that the
    # reverse KL stays finite.
    teacher = with_rest(
        torch.tensor([[math.log(0.75), math.log(0.25)], [math.log(0.9), math.log(0.2)]])
    )
    assert teacher[:, -1].tolist() == pytest.approx([MIN_REMAINDER] * 2)


def test_a_token_without_mass_adds_nothing():
    teacher = torch.tensor([[0.0, -math.inf]], dtype=torch.float64)
    logits = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    value = distillation_kl(logits.log_softmax(-1), teacher, "forward")
    assert value.item() == pytest.approx(math.log(2))
    (slope,) = torch.autograd.grad(value.sum(), logits)
    assert slope[0].tolist() == pytest.approx([-0.5, 0.5])


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["forward", "reverse"]), st.integers(1, 6))
def test_what_holds_for_any_distributions(seed, direction, k):
    rng = np.random.default_rng(seed)
    student, teacher = (torch.from_numpy(rng.normal(0, 3, (4, 7))) for _ in range(2))
    whole = distillation_kl(student.log_softmax(-1), teacher.log_softmax(-1), direction)
    ids = teacher.topk(k, -1).indices
    part = distillation_kl(
        candidate_logprobs(student, ids), candidate_logprobs(teacher, ids), direction
    )
    # Never negative; merging outcomes never adds to the divergence; equal distributions have none.
    assert (part >= -1e-12).all()
    assert (part <= whole + 1e-12).all()
    assert (
        distillation_kl(
            candidate_logprobs(student, ids), candidate_logprobs(student, ids), direction
        )
        .abs()
        .max()
        < 1e-12
    )
    # All but one token as candidates leave that one as the rest: exactly the whole divergence.
    most = teacher.topk(6, -1).indices
    torch.testing.assert_close(
        distillation_kl(
            candidate_logprobs(student, most), candidate_logprobs(teacher, most), direction
        ),
        whole,
        rtol=1e-9,
        atol=1e-12,
    )
    # What a server sends says the same as the teacher's own logits.
    sent = with_rest(teacher.log_softmax(-1).gather(-1, ids))
    expected = candidate_logprobs(teacher, ids)
    clear = expected[:, -1] > MIN_REMAINDER + 1
    torch.testing.assert_close(sent[clear], expected[clear], rtol=1e-6, atol=1e-6)
