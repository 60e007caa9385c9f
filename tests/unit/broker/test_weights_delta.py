"""Differences of buckets: exact for any bits, small where little has changed, harmless where they
are wrong.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.errors import TransferFailed
from broker.weights.delta import BLOCK_WORDS, apply, difference, word_bytes
from broker.weights.plan import TensorSpec, make_plan


def as_bytes(values: list[float], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).view(torch.uint8)


def test_layout_by_hand() -> None:
    base = as_bytes([1.0, 2.0, 3.0, 4.0] + [0.0] * 60, torch.float32)
    new = as_bytes([1.0, 7.0, 3.0, 9.0] + [0.0] * 60, torch.float32)
    made = difference(new, base, 4)
    assert made is not None
    expected = (
        np.uint32(2).tobytes()
        + np.array([1, 3], "<u2").tobytes()
        + np.array([7, 9], "<f4").tobytes()
    )
    assert made.numpy().tobytes() == expected
    apply(made, base, 4)
    assert torch.equal(base, new)


def test_signed_zeros_and_nans_are_changes() -> None:
    base = as_bytes([0.0, float("nan")] + [1.0] * 62, torch.float32)
    new = base.clone()
    new.view(torch.int32)[0] = -(2**31)  # -0.0
    new.view(torch.int32)[1] ^= 1  # another NaN
    made = difference(new, base, 4)
    assert made is not None
    apply(made, base, 4)
    assert torch.equal(base, new)


@given(
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 3000),
    st.floats(0, 0.4),
    st.integers(0, 2**32 - 1),
)
@settings(deadline=None)
def test_any_change_comes_back_bit_by_bit(
    word: int, num_lines: int, share: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    size = 64 * num_lines
    base = torch.from_numpy(rng.integers(0, 256, size, np.uint8))
    new = base.clone()
    changed = rng.random(size) < share
    new.numpy()[changed] ^= rng.integers(1, 256, int(changed.sum()), np.uint8)
    made = difference(new, base, word)
    if made is None:
        return  # it goes whole
    assert len(made) < size
    held = base.clone()
    apply(made, held, word)
    assert torch.equal(held, new)


@pytest.mark.parametrize(("word", "at_least"), [(2, 16), (4, 22)])
def test_three_percent_changed(word: int, at_least: float) -> None:
    rng = np.random.default_rng(0)
    base = torch.from_numpy(rng.integers(0, 256, 2**22, np.uint8))
    new = base.clone()
    words = new.numpy().view(f"<u{word}")
    words[rng.random(len(words)) < 0.03] ^= 1
    made = difference(new, base, word)
    assert made is not None
    assert len(new) / len(made) > at_least


def test_positions_beyond_the_first_block() -> None:
    base = torch.zeros(2 * (BLOCK_WORDS * 2 + 32), dtype=torch.uint8)
    new = base.clone()
    for index in (0, BLOCK_WORDS - 1, BLOCK_WORDS, 2 * BLOCK_WORDS + 31):
        new.view(torch.int16)[index] = -1
    made = difference(new, base, 2)
    assert made is not None
    assert made[:12].view(torch.int32).tolist() == [2, 1, 1]
    apply(made, base, 2)
    assert torch.equal(base, new)


def test_whole_where_that_is_no_more() -> None:
    base = torch.zeros(4096, dtype=torch.uint8)
    assert difference(base + 1, base, 2) is None


def wrong(*parts: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (wrong(b"\1\0"), "lacks the counts of 1 blocks"),
        (wrong(np.int32(-1).tobytes(), bytes(8)), "announces -1 words"),
        (wrong(np.int32(2).tobytes(), bytes(4), bytes(4)), "announces 2 words"),
        (
            wrong(np.int32(1).tobytes(), np.uint16(16).tobytes(), bytes(2), bytes(4)),
            "changes word 16 of 16",
        ),
    ],
)
def test_nonsense_changes_nothing(data: torch.Tensor, said: str) -> None:
    bucket = torch.arange(64, dtype=torch.uint8)
    with pytest.raises(TransferFailed, match=said):
        apply(data, bucket, 4)
    assert torch.equal(bucket, torch.arange(64, dtype=torch.uint8))


def test_words_are_those_of_most_bytes() -> None:
    plan = make_plan([TensorSpec("a", (100,), "bfloat16"), TensorSpec("b", (49,), "float32")], 1)
    assert word_bytes(plan) == 2
    plan = make_plan([TensorSpec("a", (100,), "bfloat16"), TensorSpec("b", (51,), "float32")], 1)
    assert word_bytes(plan) == 4
