"""The Bradley-Terry loss by hand, and what holds for any scores."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.algorithm.losses.bradley_terry import bradley_terry

SCORES = st.floats(-20, 20)


def test_loss_and_slopes_by_hand() -> None:
    # 2 against 0.5: margin 1.5, -log sigmoid(1.5) = log(1 + e^-1.5) = 0.2014132780. Its slopes are
    # -+ sigmoid(-1.5) = -+ 0.1824255238. The center adds 0.1 * 2.5^2 = 0.625 and 2 * 0.1 * 2.5 = 0.5
    # to both slopes.
    scores = torch.tensor([[2.0, 0.5]], dtype=torch.float64, requires_grad=True)
    losses, margins = bradley_terry(scores)
    assert margins.tolist() == [1.5]
    assert losses.item() == pytest.approx(0.2014132780, abs=1e-9)
    (slopes,) = torch.autograd.grad(losses.sum(), scores)
    assert slopes[0].tolist() == pytest.approx([-0.1824255238, 0.1824255238], abs=1e-9)
    losses, _ = bradley_terry(scores, 0.1)
    assert losses.item() == pytest.approx(0.8264132780, abs=1e-9)
    (slopes,) = torch.autograd.grad(losses.sum(), scores)
    assert slopes[0].tolist() == pytest.approx([0.3175744762, 0.6824255238], abs=1e-9)


@settings(deadline=None, max_examples=50)
@given(SCORES, SCORES, SCORES)
def test_an_offset_changes_nothing_without_center(
    chosen: float, rejected: float, offset: float
) -> None:
    plain, margins = bradley_terry(torch.tensor([[chosen, rejected]], dtype=torch.float64))
    scores = torch.tensor([[chosen + offset, rejected + offset]], dtype=torch.float64)
    shifted, _ = bradley_terry(scores)
    assert shifted.item() == pytest.approx(plain.item(), abs=1e-9)
    swapped, opposite = bradley_terry(torch.tensor([[rejected, chosen]], dtype=torch.float64))
    assert opposite.item() == -margins.item()
    # log(1 + e^-m) - log(1 + e^m) = -m
    assert plain.item() - swapped.item() == pytest.approx(-margins.item(), abs=1e-9)


def test_equal_scores_cost_log_two() -> None:
    assert bradley_terry(torch.zeros(3, 2))[0].tolist() == pytest.approx([math.log(2)] * 3)
