"""The cross entropy of outcomes by hand."""

from __future__ import annotations

import pytest
import torch

from learner.algorithm.losses.outcome import outcome
from learner.algorithm.losses.preference import PairLogprobs


def make_pairs(*values: float) -> PairLogprobs:
    columns = [torch.tensor([value], dtype=torch.float64) for value in values]
    return PairLogprobs(*columns, *[torch.ones(1, dtype=torch.float64)] * 2)


def test_each_answer_is_judged_by_itself() -> None:
    # beta 0.5: r_w = 0.5 (-2 + 4) = 1, r_l = 0.5 (-5 + 4) = -0.5. -log sigmoid(1) = 0.3132616875,
    # -log sigmoid(0.5) = 0.4740769842, their mean 0.3936693358. Slopes by the logprobs: -0.5
    # sigmoid(-1) / 2 = -0.0672353553 and 0.5 sigmoid(-0.5) / 2 = 0.0943851672.
    pairs = make_pairs(-2.0, -5.0, -4.0, -4.0)
    pairs.chosen.requires_grad_()
    pairs.rejected.requires_grad_()
    losses, margins = outcome(pairs, 0.5)
    assert margins.tolist() == [1.5]
    assert losses.item() == pytest.approx(0.3936693358, abs=1e-9)
    slopes = torch.autograd.grad(losses.sum(), (pairs.chosen, pairs.rejected))
    assert [slope.item() for slope in slopes] == pytest.approx(
        [-0.0672353553, 0.0943851672], abs=1e-9
    )


def test_a_common_lead_is_not_free() -> None:
    # Both answers gain 2 nats on the reference: dpo's margin stays 1.5, here the failed answer
    # costs more: r_w = 2, r_l = 0.5, (log(1 + e^-2) + log(1 + e^0.5)) / 2 = (0.1269280110 +
    # 0.9740769842) / 2.
    losses, margins = outcome(make_pairs(0.0, -3.0, -4.0, -4.0), 0.5)
    assert margins.tolist() == [1.5]
    assert losses.item() == pytest.approx(0.5505024976, abs=1e-9)
