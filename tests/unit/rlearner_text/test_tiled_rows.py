"""Linear layers and elementwise functions that give a row the same bits next to any others."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from rlearner_text.exact.tiled_rows import (
    TILE,
    LinearRows,
    MapElements,
    linear_rows,
    map_elements,
    pad_front,
)

WEIGHT = torch.randn(48, 37, generator=torch.Generator().manual_seed(0))
ROWS = torch.randn(100, 37, generator=torch.Generator().manual_seed(1))


def test_linear_rows_worked_by_hand() -> None:
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    weight = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 2.0]])
    bias = torch.tensor([0.0, 1.0, 0.0])
    # 1*1, 1*1 + 2*1 + 1, 2*2; 3*1, 3*1 + 4*1 + 1, 4*2
    assert linear_rows(rows, weight, bias).tolist() == [[1.0, 4.0, 4.0], [3.0, 8.0, 8.0]]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 99), min_size=1, max_size=80))
def test_a_row_has_the_same_bits_among_any_others(chosen: list[int]) -> None:
    whole = linear_rows(ROWS, WEIGHT, None)
    assert torch.equal(linear_rows(ROWS[chosen], WEIGHT, None), whole[chosen])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", [0, 1, 7, TILE - 1])
def test_a_row_has_the_same_bits_at_any_place_of_a_tile(dtype: torch.dtype, place: int) -> None:
    row = ROWS[:1].to(dtype)
    weight = WEIGHT.to(dtype)
    others = torch.roll(ROWS[:TILE].to(dtype), place, 0).clone()
    others[place] = row
    assert torch.equal(linear_rows(others, weight, None)[place], linear_rows(row, weight, None)[0])


def test_the_gradient_is_that_of_a_linear_layer() -> None:
    bias = torch.zeros(48)
    ours = [tensor.clone().requires_grad_() for tensor in (ROWS, WEIGHT, bias)]
    theirs = [tensor.clone().requires_grad_() for tensor in (ROWS, WEIGHT, bias)]
    LinearRows.apply(*ours).square().sum().backward()
    functional.linear(*theirs).square().sum().backward()
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=1e-3)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 200), st.integers(1, 130))
def test_an_element_has_the_same_bits_in_a_tensor_of_any_size(start: int, size: int) -> None:
    values = torch.linspace(-9, 9, 40_000)
    whole = map_elements(functional.silu, values)
    part = slice(start, start + size)
    assert torch.equal(map_elements(functional.silu, values[part].clone()), whole[part])


def test_elements_keep_their_shape_and_their_gradient() -> None:
    values = torch.tensor([[0.0, 1.0], [-1.0, 2.0]], requires_grad=True)
    result = MapElements.apply(torch.exp, values)
    # the derivative of exp is exp
    result.sum().backward()
    expected = [[1.0, math.e], [1 / math.e, math.e**2]]
    torch.testing.assert_close(result, torch.tensor(expected))
    torch.testing.assert_close(values.grad, torch.tensor(expected))


def test_padding_adds_zeros_up_to_a_multiple() -> None:
    assert pad_front(torch.ones(3, 1), 4).tolist() == [[1.0], [1.0], [1.0], [0.0]]
    whole = torch.ones(4, 1)
    assert pad_front(whole, 4) is whole
