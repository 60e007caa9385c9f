"""Copies: the same bits whatever way is taken."""

from __future__ import annotations

import pytest
import torch

from broker.weights.memory.copying import PIECE_BYTES, copy_all, copy_into, is_plain


@pytest.mark.parametrize("num_threads", [1, 3, None])
def test_all_kinds_of_pairs_arrive(num_threads: int | None) -> None:
    large = torch.rand(PIECE_BYTES // 4 * 2 + 17)  # three pieces, the last one small
    sources = [
        large,
        large[:5],
        large[: 200 * 300].view(200, 300).t(),
        large[:100_000].bfloat16(),
        torch.tensor(7.0),
    ]
    targets = [
        torch.zeros_like(large),
        torch.zeros(5),
        torch.zeros(300, 200),
        torch.zeros(100_000),
        torch.tensor(0.0),
    ]
    copy_all(zip(targets, sources, strict=True), num_threads)
    assert [is_plain(target, source) for target, source in zip(targets, sources, strict=True)] == [
        True,
        False,
        False,
        False,
        False,
    ]
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source.to(target.dtype))


def test_parameters_and_odd_bits() -> None:
    bits = torch.randint(-(2**15), 2**15, (100_000,), dtype=torch.int16)
    parameter = torch.nn.Parameter(torch.zeros(100_000, dtype=torch.bfloat16))
    with torch.no_grad():
        copy_into(parameter, bits.view(torch.bfloat16))
    assert torch.equal(parameter.detach().view(torch.int16), bits)


def test_another_shape_is_refused() -> None:
    with pytest.raises(RuntimeError, match="must match"):
        copy_all([(torch.zeros(100_000), torch.zeros(99_999))], 2)
