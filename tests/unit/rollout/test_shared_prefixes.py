"""Which slot a prompt's beginning is copied from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from broker.contract.wire import SamplingParams
from rollout.engines.hf.request_row import RequestRow
from rollout.engines.hf.shared_prefixes import MIN_SHARED, SharedPrefixes
from rollout.job_queue import ENDED, GenerationJob


def make_row(slot: int, prompt: Sequence[int], cached: int = 0) -> RequestRow:
    tokens = np.array(prompt, np.int32)
    job = GenerationJob(f"in {slot}", "", tokens, 4, 0, 0.0, 1.0, slot=slot)
    return RequestRow(
        job, SamplingParams(max_tokens=4), cached, version=0, room=99, end_ids=frozenset(), stops=None
    )  # fmt: skip


LONG = range(100, 140)


def test_a_row_takes_over_the_longest_beginning_but_for_its_last_token() -> None:
    prefixes = SharedPrefixes(whole_prompts=False)
    short = make_row(0, [*LONG[:20], *range(9)])
    whole = make_row(1, LONG)
    again = make_row(2, LONG)
    for row in (short, whole, again):
        prefixes.add(row)
    assert short.source is None
    assert (whole.source, whole.num_shared) == (short, 20)
    assert (again.source, again.num_shared) == (whole, 39)


def test_rows_that_share_less_than_a_waiting_one_wait_for_what_it_waits_for() -> None:
    prefixes = SharedPrefixes(whole_prompts=False)
    rows = [make_row(slot, [*LONG[:20], *range(slot, slot + 12)]) for slot in range(4)]
    for row in rows:
        prefixes.add(row)
    assert [row.source for row in rows] == [None, rows[0], rows[0], rows[0]]


def test_a_slot_that_another_row_has_taken_is_not_copied() -> None:
    prefixes = SharedPrefixes(whole_prompts=False)
    first, second = make_row(0, LONG), make_row(1, LONG)
    prefixes.add(first)
    prefixes.add(second)
    first.cached = len(LONG)
    first.job.slot = ENDED
    assert prefixes.is_usable(first, second.num_shared)
    prefixes.add(make_row(0, range(30)))
    assert not prefixes.is_usable(first, second.num_shared)


def test_a_row_that_ended_early_is_not_waited_for() -> None:
    prefixes = SharedPrefixes(whole_prompts=False)
    first = make_row(0, LONG, cached=16)
    prefixes.add(first)
    first.job.slot = ENDED
    assert prefixes.is_usable(first, 16)
    assert not prefixes.is_usable(first, 17)


def test_what_the_same_slot_holds_stays_there() -> None:
    prefixes = SharedPrefixes(whole_prompts=False)
    first = make_row(0, LONG, cached=len(LONG))
    prefixes.add(first)
    first.job.slot = ENDED
    second = make_row(0, [*LONG[:25], 1, 2, 3])
    prefixes.add(second)
    assert (second.cached, second.reused, second.source) == (25, 25, None)


def test_states_are_only_copied_at_the_end_of_the_same_prompt() -> None:
    prefixes = SharedPrefixes(whole_prompts=True)
    first, other, second = make_row(0, LONG), make_row(1, [*LONG[:30], 5]), make_row(2, LONG)
    for row in (first, other, second):
        prefixes.add(row)
    assert (other.source, second.source, second.num_shared) == (None, first, 39)
    first.cached = 39
    assert prefixes.is_usable(first, 39)
    first.cached = 40  # it has gone on
    assert not prefixes.is_usable(first, 39)


@pytest.mark.parametrize("length", [MIN_SHARED - 1, MIN_SHARED])
def test_a_short_beginning_is_computed(length: int) -> None:
    prefixes = SharedPrefixes(whole_prompts=False)
    prefixes.add(first := make_row(0, LONG, cached=len(LONG)))
    prefixes.add(second := make_row(1, [*LONG[:length], 1, 2]))
    assert second.source is (first if length == MIN_SHARED else None)


def test_nothing_of_older_weights_is_found() -> None:
    prefixes = SharedPrefixes(whole_prompts=False)
    prefixes.add(make_row(0, LONG, cached=len(LONG)))
    prefixes.clear()
    prefixes.add(row := make_row(1, LONG))
    assert row.source is None
