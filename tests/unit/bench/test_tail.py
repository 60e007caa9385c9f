"""The simulated batch of bench.tail, by hand."""

from __future__ import annotations

import pytest

from bench.tail.scene import PREFILL_S, SEQUENCE_S, STEP_S, Batch


def test_answers_of_a_batch_grow_together_and_a_new_context_holds_them_up() -> None:
    batch = Batch()
    batch.add(0, 10, context=0)
    one, two = STEP_S + SEQUENCE_S, STEP_S + 2 * SEQUENCE_S
    assert batch.next_end() == pytest.approx(10 * one)
    batch.advance(4 * one)
    batch.add(1, 3, context=100)
    end = 4 * one + 100 * PREFILL_S + 3 * two
    assert batch.next_end() == pytest.approx(end)
    batch.advance(end)
    assert batch.ended() == [1]
    assert batch.remove(1) == 3
    assert batch.next_end() == pytest.approx(end + 3 * one)
    assert batch.remove(0) == 7  # interrupted
    batch.add(0, 5, context=0)  # another answer in its slot does not end where the first would have
    batch.advance(end + 3 * one)
    assert batch.ended() == []
    assert batch.tokens == pytest.approx(4 + 2 * 3 + 3)
