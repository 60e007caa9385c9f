import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.algorithm.divergences import binary_kl


def test_binary_kl_by_hand():
    # 0.5 against 0.8: 0.5 ln(5/8) + 0.5 ln(5/2) = -0.2350018 + 0.4581454 = 0.2231436. The other way:
    # 0.8 ln(8/5) + 0.2 ln(2/5) = 0.3760029 - 0.1832581 = 0.1927448.
    half, most = torch.tensor([0.5]).log(), torch.tensor([0.8]).log()
    assert binary_kl(half, most).item() == pytest.approx(0.2231436, abs=1e-6)
    assert binary_kl(most, half).item() == pytest.approx(0.1927448, abs=1e-6)
    assert binary_kl(half, half).item() == 0.0


@given(st.floats(-30, 0), st.floats(-30, 0))
def test_binary_kl_is_finite_and_never_negative(log_p, log_q):
    value = binary_kl(torch.tensor([log_p]), torch.tensor([log_q])).item()
    assert math.isfinite(value)
    assert value >= 0


def test_binary_kl_never_exceeds_the_whole_divergence():
    # All tokens of a vocabulary of three: 0.5 ln(0.5/0.2) + 0.3 ln(0.3/0.3) + 0.2 ln(0.2/0.5).
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    whole = (p * (p / q).log()).sum()
    assert (binary_kl(p.log(), q.log()) <= whole + 1e-6).all()
