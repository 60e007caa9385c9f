import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.algorithm.packing import (
    MicroBatchCutter,
    by_length,
    by_prefix,
    cut_micro_batches,
    num_distinct_tokens,
    prefix_order,
)

LENGTHS = st.lists(st.integers(0, 50), max_size=40)


@dataclass
class Row:
    number: int
    num_inputs: int


def rows(lengths):
    return [Row(number, length) for number, length in enumerate(lengths)]


def lengths_of(batches):
    return [[row.num_inputs for row in batch] for batch in batches]


def test_by_hand():
    # Budget 20. 5, 5, 5: 15 padded. A 6 would make 4 x 6 = 24: cut. 6, 9: 18. A 3 would make 3 x 9
    # = 27: cut. 3, then 40 alone exceeds the budget: cut before it and after it.
    assert lengths_of(cut_micro_batches(rows([5, 5, 5, 6, 9, 3, 40, 2]), 20)) == [
        [5, 5, 5],
        [6, 9],
        [3],
        [40],
        [2],
    ]


def test_a_micro_batch_comes_out_with_the_first_sample_that_does_not_fit():
    cutter = MicroBatchCutter[Row](10)
    a, b, c = rows([5, 5, 1])
    assert cutter.add(a) is None
    assert cutter.add(b) is None
    assert cutter.add(c) == [a, b]
    assert cutter.flush() == [c]
    assert cutter.flush() is None


def test_budget_must_be_positive():
    with pytest.raises(ValueError, match="budget is 0"):
        MicroBatchCutter[Row](0)


@given(LENGTHS, st.integers(1, 120))
def test_order_budget_and_completeness(lengths, budget):
    batches = cut_micro_batches(rows(lengths), budget)
    assert [row.number for batch in batches for row in batch] == [
        i for i, n in enumerate(lengths) if n
    ]
    for batch in batches:
        assert len(batch) * max(row.num_inputs for row in batch) <= budget or len(batch) == 1


@given(LENGTHS, st.integers(1, 120))
def test_no_micro_batch_could_have_taken_the_next_sample(lengths, budget):
    batches = lengths_of(cut_micro_batches(rows(lengths), budget))
    for batch, following in itertools.pairwise(batches):
        assert (len(batch) + 1) * max(*batch, following[0]) > budget


@given(LENGTHS, st.integers(0, 40), st.integers(1, 120))
def test_what_was_cut_does_not_depend_on_what_follows(lengths, seen, budget):
    # A step may be trained while its tail is still being generated.
    early, late = MicroBatchCutter[Row](budget), MicroBatchCutter[Row](budget)
    first = [batch for row in rows(lengths[:seen]) if (batch := early.add(row))]
    whole = [batch for row in rows(lengths) if (batch := late.add(row))]
    assert whole[: len(first)] == first


@given(LENGTHS, st.integers(1, 120))
def test_slices_hold_the_same_rows_with_no_more_padding(lengths, budget):
    samples = [row for row in rows(lengths) if row.num_inputs]
    slices = by_length(samples, budget)
    assert sorted(row.number for part in slices for row in part) == [row.number for row in samples]
    flat = [row.num_inputs for part in slices for row in part]
    assert flat == sorted(flat)
    assert all(len(part) * part[-1].num_inputs <= budget or len(part) == 1 for part in slices)


TOKENS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=14)


@dataclass
class Tokens:
    token_ids: np.ndarray

    @property
    def num_inputs(self):
        return len(self.token_ids)


def test_samples_with_a_common_prefix_come_into_one_slice():
    samples = [
        Tokens(np.array(ids)) for ids in ([7, 7, 1], [5, 5, 1, 2], [7, 7, 2, 3], [5, 5, 3], [9])
    ]
    # 5 5 1 2 and 5 5 3 have 5 distinct tokens, 7 7 1 and 7 7 2 3 also, 9 has 1
    assert num_distinct_tokens(samples) == 11
    slices = [[one.token_ids.tolist() for one in part] for part in by_prefix(samples, 6)]
    assert slices == [[[5, 5, 1, 2], [5, 5, 3]], [[7, 7, 1], [7, 7, 2, 3], [9]]]
    assert [len(part) for part in by_prefix(samples, 11)] == [5]
    # a slice that begins within a group has its prefix again
    assert [len(part) for part in by_prefix(samples, 4)] == [1, 1, 1, 1, 1]


def test_prefixes_are_ordered_by_number_not_by_byte():
    order = prefix_order([np.array([256]), np.array([2, 1]), np.array([2]), np.array([70000])])
    assert order == [(2, 0), (1, 1), (0, 0), (3, 0)]


@given(TOKENS, st.integers(1, 30))
def test_slices_by_prefix_hold_every_sample_once_within_the_budget(tokens, budget):
    samples = [Tokens(np.array(one)) for one in tokens]
    slices = by_prefix(samples, budget)
    assert sorted(id(one) for part in slices for one in part) == sorted(map(id, samples))
    assert all(num_distinct_tokens(part) <= budget or len(part) == 1 for part in slices)
    assert sum(map(num_distinct_tokens, slices)) >= num_distinct_tokens(samples)
    assert all(
        num_distinct_tokens([*part, *after[:1]]) > budget
        for part, after in itertools.pairwise(slices)
    )
