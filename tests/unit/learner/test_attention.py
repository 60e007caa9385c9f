"""Attention of short sequences in bfloat16 on a CPU is computed in float32."""

from __future__ import annotations

import pytest
import torch

from learner.backends.models.attention import AttentionPattern, SequenceAttention


def see_window(_row: object, _head: object, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return (key <= query) & (key > query - 5)


@pytest.mark.parametrize("window", [False, True])
def test_bfloat16_is_rounded_only_at_the_end(window: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 4, 21, 16), (3, 2, 21, 16), (3, 2, 21, 16)]
    exact = [torch.randn(shape, generator=generator).bfloat16().float() for shape in shapes]
    rounded = [tensor.bfloat16().requires_grad_() for tensor in exact]
    for tensor in exact:
        tensor.requires_grad_()
    pattern = AttentionPattern(see_window, 5, torch.device("cpu")) if window else None
    attend = SequenceAttention(None, pattern)
    expected, found = attend(*exact), attend(*rounded)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected.bfloat16())
    weights = torch.randn(expected.shape, generator=generator).bfloat16()
    (expected * weights.float()).sum().backward()
    (found * weights).sum().backward()
    for one, other in zip(exact, rounded, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        # heads that share keys add up rounded parts
        torch.testing.assert_close(other.grad.float(), one.grad, rtol=2**-7, atol=2**-7)
