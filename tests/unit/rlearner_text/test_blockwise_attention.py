"""Attention that gives a query the same bits, alone or within its sequence."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from rlearner_text.exact.blockwise_attention import KEYS, QUERIES, attend_causally, attend_rows

HEADS, KV_HEADS, WIDTH = 6, 2, 24


def states(length: int, *, seed: int = 0, num: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(num, HEADS, length, WIDTH, generator=generator)
    key = torch.randn(num, KV_HEADS, length, WIDTH, generator=generator)
    value = torch.randn(num, KV_HEADS, length, WIDTH, generator=generator)
    return query, key, value


def test_attention_worked_by_hand() -> None:
    query = torch.tensor([[[[1.0], [1.0]]]])
    key = torch.tensor([[[[0.0], [math.log(3.0)]]]])
    value = torch.tensor([[[[10.0], [20.0]]]])
    # The first token sees itself. The second: weights e^0 = 1 and e^ln 3 = 3, so
    # (1 * 10 + 3 * 20) / 4 = 17.5.
    attended = attend_causally(query, key, value, scaling=1.0)
    torch.testing.assert_close(attended.flatten(), torch.tensor([10.0, 17.5]))


@pytest.mark.parametrize("length", [1, QUERIES, KEYS, KEYS + 1, 3 * KEYS + 5])
def test_attention_equals_that_of_torch(length: int) -> None:
    query, key, value = states(length, num=2)
    expected = functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True, scale=0.3
    )
    torch.testing.assert_close(
        attend_causally(query, key, value, scaling=0.3), expected, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("position", [0, 5, KEYS - 1, KEYS, 150])
def test_a_query_alone_has_the_bits_that_it_has_in_its_sequence(position: int) -> None:
    query, key, value = states(200)
    whole = attend_causally(query, key, value, scaling=0.2)
    groups = HEADS // KV_HEADS
    # as a server decodes: what is cached beyond the token is of another sequence
    other_key, other_value = (state.clone() for state in (key, value))
    other_key[:, :, position + 1 :] = 7.0
    other_value[:, :, position + 1 :] = -3.0
    alone = attend_rows(
        query[0, :, position].view(KV_HEADS, groups, WIDTH),
        other_key[0],
        other_value[0],
        torch.full((KV_HEADS, groups), position),
        scaling=0.2,
    )
    assert torch.equal(alone.reshape(HEADS, WIDTH), whole[0, :, position])


@pytest.mark.parametrize("length", [3, 70, 190])
def test_a_sequence_has_the_same_bits_next_to_others(length: int) -> None:
    query, key, value = states(200, num=5)
    first = [state[:1, :, :length] for state in (query, key, value)]
    whole = attend_causally(query, key, value, scaling=0.2)
    assert torch.equal(attend_causally(*first, scaling=0.2), whole[:1, :, :length])


def test_bfloat16_is_computed_in_float32() -> None:
    query, key, value = (state.bfloat16() for state in states(80))
    attended = attend_causally(query, key, value, scaling=0.2)
    exact = attend_causally(query.float(), key.float(), value.float(), scaling=0.2)
    assert torch.equal(attended, exact.bfloat16())
