"""DPO and IPO by hand, and what must hold for any numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.settings.registry import resolve
from learner.algorithm.losses.dpo import dpo
from learner.algorithm.losses.ipo import ipo
from learner.algorithm.losses.preference import PairLogprobs
from learner.offline import PREFERENCES


def pairs(chosen, rejected, ref_chosen, ref_rejected, chosen_tokens=1.0, rejected_tokens=1.0):
    columns = (chosen, rejected, ref_chosen, ref_rejected, chosen_tokens, rejected_tokens)
    return PairLogprobs(*(torch.as_tensor([value], dtype=torch.float64) for value in columns))


def test_dpo_by_hand():
    # policy: -2 against -5, reference: -3 against -4. Difference (-2 + 5) - (-3 + 4) = 2, times
    # beta 0.5 is 1. -log sigmoid(1) = log(1 + e^-1) = 0.3132616875; the derivative by the margin is
    # -sigmoid(-1) = -0.2689414214, times beta.
    batch = pairs(-2.0, -5.0, -3.0, -4.0)
    batch.chosen.requires_grad_()
    losses, margins = dpo(batch, 0.5)
    assert margins.tolist() == [1.0]
    assert losses.item() == pytest.approx(0.3132616875182228)
    (slope,) = torch.autograd.grad(losses.sum(), batch.chosen)
    assert slope.item() == pytest.approx(-0.5 * 0.2689414213699951)


def test_label_smoothing_by_hand():
    # Margin 1 as above, s = 0.1: 0.9 * 0.3132617 + 0.1 * 1.3132617 = 0.4132617. The slope by the
    # margin is 0.9 * -0.2689414 + 0.1 * 0.7310586 = -0.1689414, times beta 0.5. It is 0 at ln 9.
    batch = pairs(-2.0, -5.0, -3.0, -4.0)
    batch.chosen.requires_grad_()
    losses, margins = dpo(batch, 0.5, label_smoothing=0.1)
    assert margins.tolist() == [1.0]
    assert losses.item() == pytest.approx(0.4132616875)
    (slope,) = torch.autograd.grad(losses.sum(), batch.chosen)
    assert slope.item() == pytest.approx(-0.5 * 0.1689414214)
    least = pairs(math.log(9), 0.0, 0.0, 0.0)
    least.chosen.requires_grad_()
    dpo(least, 1.0, label_smoothing=0.1)[0].sum().backward()
    assert least.chosen.grad.item() == pytest.approx(0.0, abs=1e-12)


def test_ipo_by_hand():
    # Log-ratios: chosen -2 + 4 = 2 over 4 tokens is 0.5; rejected -5 + 3 = -2 over 2 tokens is -1.
    # h = 1.5. beta 0.25 draws h to 1 / (2 * 0.25) = 2: loss (1.5 - 2)^2 = 0.25, derivative by h 2 *
    # -0.5 = -1, by the chosen sum -1 / 4, by the rejected one +1 / 2. The margin is beta h = 0.375.
    batch = pairs(-2.0, -5.0, -4.0, -3.0, 4.0, 2.0)
    batch.chosen.requires_grad_()
    batch.rejected.requires_grad_()
    losses, margins = ipo(batch, 0.25)
    assert losses.tolist() == [0.25]
    assert margins.tolist() == [0.375]
    slopes = torch.autograd.grad(losses.sum(), (batch.chosen, batch.rejected))
    assert [slope.item() for slope in slopes] == [-0.25, 0.5]


NUMBERS = st.floats(-50, 0)


@pytest.mark.parametrize("name", PREFERENCES)
@settings(deadline=None)
@given(
    st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS),
    st.floats(0.01, 1),
    st.integers(1, 40),
    st.integers(1, 40),
)
def test_what_holds_for_any_pair(name, logprobs, beta, chosen_tokens, rejected_tokens):
    loss = resolve("preferences", name, PREFERENCES)
    batch = pairs(*logprobs, float(chosen_tokens), float(rejected_tokens))
    swapped = pairs(
        logprobs[1],
        logprobs[0],
        logprobs[3],
        logprobs[2],
        float(rejected_tokens),
        float(chosen_tokens),
    )
    losses, margins = loss(batch, beta)
    assert losses.item() >= 0
    # The other answer chosen: the margin turns its sign. Moving policy and reference together
    # changes nothing.
    assert loss(swapped, beta)[1].item() == pytest.approx(-margins.item(), abs=1e-12)
    shifted = pairs(
        logprobs[0] - 3,
        logprobs[1] - 5,
        logprobs[2] - 3,
        logprobs[3] - 5,
        float(chosen_tokens),
        float(rejected_tokens),
    )
    assert loss(shifted, beta)[0].item() == pytest.approx(losses.item(), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(("name", "value"), [("dpo", math.log(2)), ("ipo", 25.0)])
def test_at_the_reference_the_loss_is_known(name, value):
    # dpo: -log sigmoid(0) = log 2. ipo: (0 - 1 / (2 * 0.1))^2 = 25.
    losses, margins = resolve("preferences", name, PREFERENCES)(
        pairs(-7.0, -3.0, -7.0, -3.0, 5.0, 9.0), 0.1
    )
    assert losses.item() == pytest.approx(value)
    assert margins.item() == 0.0
