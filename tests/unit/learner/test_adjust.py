"""Batch adjustment: the size divides, no sample changes, the same draw every time."""

from __future__ import annotations

from collections import Counter
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.algorithm.batch_adjust import Mode, adjust_samples

MODES = get_args(Mode)


@given(
    n=st.integers(1, 60),
    divisor=st.integers(1, 17),
    mode=st.sampled_from(MODES),
    seed=st.integers(0, 9),
)
def test_the_number_divides_and_only_samples_that_were_there_come_out(
    n: int, divisor: int, mode: Mode, seed: int
) -> None:
    samples = list(range(n))
    found = adjust_samples(samples, divisor, mode, seed)
    assert found == adjust_samples(samples, divisor, mode, seed)
    assert set(found) <= set(samples)
    if mode == "delete" and n < divisor:
        assert found == samples
        return
    assert len(found) % divisor == 0
    assert abs(len(found) - n) < divisor
    if n % divisor == 0:
        assert found == samples


@given(n=st.integers(1, 60), divisor=st.integers(2, 17))
def test_copies_are_as_few_and_as_even_as_can_be(n: int, divisor: int) -> None:
    found = adjust_samples(list(range(n)), divisor, "copy", 0)
    assert found[:n] == list(range(n))
    assert len(found) == -(-n // divisor) * divisor
    counts = Counter(found).values()
    assert max(counts) - min(counts) <= 1


def test_deleting_keeps_the_order() -> None:
    found = adjust_samples(list(range(10)), 4, "delete", 3)
    assert len(found) == 8
    assert found == sorted(set(found))


# 10: two either way, so copies
@pytest.mark.parametrize(("n", "size"), [(9, 8), (10, 12), (11, 12), (3, 4), (1, 4)])
def test_auto_changes_as_few_as_it_can(n: int, size: int) -> None:
    assert len(adjust_samples(list(range(n)), 4, "auto", 0)) == size


@pytest.mark.parametrize(("n", "size"), [(11, 8), (3, 4)])
def test_random_sample_draws_the_lower_multiple_or_the_first(n: int, size: int) -> None:
    assert len(adjust_samples(list(range(n)), 4, "random_sample", 0)) == size


def test_another_step_draws_other_samples() -> None:
    assert (
        len({tuple(adjust_samples(list(range(50)), 8, "delete", step)) for step in range(20)}) > 10
    )
