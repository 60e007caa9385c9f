"""Rounding of float32 weights to bfloat16: nothing small is lost, and nothing depends on chance."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from broker.weights.memory.copying import copy_all, copy_into
from broker.weights.rounding import PERIOD, round_into

SIZE = 3 * PERIOD + 1000


def rounded(values: torch.Tensor, first: int = 0) -> torch.Tensor:
    target = torch.empty(values.shape, dtype=torch.bfloat16)
    round_into(target, values, first)
    return target


def grid_step(values: torch.Tensor) -> torch.Tensor:
    """Return the distance of bfloat16's neighbours at each value, 2^-7 of its power of two."""
    return torch.exp2(torch.floor(torch.log2(values.abs().double()))) / 128


def test_values_on_the_grid_stay() -> None:
    values = torch.randn(SIZE, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(rounded(values.float()), values)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9])
def test_as_many_elements_move_as_the_values_did(share: float) -> None:
    """A tenth of a step moves a tenth of the elements: to nearest it would be none, or all."""
    start = torch.full((SIZE,), 1.0)
    moved = (rounded(start + share / 128) != 1.0).double().mean()
    assert moved == pytest.approx(share, abs=2e-4)
    assert rounded(-start - share / 128).float().mean() == pytest.approx(-1 - share / 128, abs=1e-5)


def test_sums_follow_small_updates() -> None:
    """Matrix products see an update of a hundredth of a step, which rounding to nearest hides."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(64, 4096, generator=generator).bfloat16().float()
    inputs = torch.randn(4096, generator=generator)
    update = 1e-5 * inputs.sign() * torch.ones(64, 1)
    wanted = (update @ inputs).mean()
    seen = ((rounded(weights + update).float() - weights) @ inputs).mean()
    hidden = (((weights + update).bfloat16().float() - weights) @ inputs).mean()
    assert seen == pytest.approx(float(wanted), rel=0.1)
    assert abs(hidden) < 0.2 * wanted


def test_an_element_changes_once_while_its_value_grows() -> None:
    start = torch.linspace(0.5, 0.99, PERIOD).bfloat16().float()
    steps = [rounded(start + i * grid_step(start).float() / 8) for i in range(9)]
    changes = sum((after != before).int() for before, after in itertools.pairwise(steps))
    assert set(changes.unique().tolist()) <= {1, 2}  # 2: at the end of a step, another begins


@given(
    st.lists(st.floats(width=32), min_size=1, max_size=50),
    st.integers(0, 3 * PERIOD),
)
def test_every_value_becomes_a_neighbour(values: list[float], first: int) -> None:
    source = torch.tensor(values, dtype=torch.float32)
    result = rounded(source, first)
    assert torch.equal(result.isnan(), source.isnan())
    bits = source.view(torch.int32).numpy().view(np.uint32)
    low = (bits >> 16).astype(np.uint16)
    got = result.view(torch.int16).numpy().view(np.uint16)
    for value, lower, at in zip(values, low, got, strict=True):
        assert value != value or at in (lower, lower + 1)


@given(st.integers(0, 2 * PERIOD), st.integers(1, 5000))
def test_a_part_is_rounded_like_the_whole(first: int, size: int) -> None:
    values = torch.randn(SIZE, generator=torch.Generator().manual_seed(2))
    part = slice(first, first + size)
    assert torch.equal(rounded(values[part], first), rounded(values)[part])


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800001])
def test_every_nan_stays_one(bits: int) -> None:
    values = torch.from_numpy(np.full(10, bits, dtype=np.uint32).view(np.float32))
    assert rounded(values).isnan().all()


def test_copies_round_by_thresholds() -> None:
    values = torch.randn(300, 40)
    wanted = rounded(values)
    for copy in (lambda into: copy_into(into, values), lambda into: copy_all([(into, values)])):
        target = torch.empty(300, 40, dtype=torch.bfloat16)
        copy(target)
        assert torch.equal(target, wanted)
    transposed = torch.empty(40, 300, dtype=torch.bfloat16).T
    copy_into(transposed, values)
    assert torch.equal(transposed, wanted)
    spread = torch.randn(300, 80)[:, ::2]
    assert torch.equal(rounded(spread), rounded(spread.contiguous()))
