"""Work beside a transfer: in order, and over when the transfer is."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from broker.weights.threads import GIVES_WAY, Beside


def test_calls_are_worked_off_in_order_by_one_thread_that_gives_way() -> None:
    seen: list[int] = []
    with Beside("t") as beside:
        results = [beside(lambda n=n: (seen.append(n), n * n)[1]) for n in range(20)]  # type: ignore[misc]
        niceness = beside(lambda: os.getpriority(os.PRIO_PROCESS, 0))
    assert [result.result() for result in results] == [n * n for n in range(20)]
    assert seen == list(range(20))
    if sys.platform == "linux":
        assert niceness.result() == min(19, os.getpriority(os.PRIO_PROCESS, 0) + GIVES_WAY)
    assert os.getpriority(os.PRIO_PROCESS, 0) < 19 or niceness.result() == 19


def test_an_error_in_a_call_is_raised_where_it_is_asked_for() -> None:
    with Beside("t") as beside:
        failing = beside(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        failing.result()


def test_what_has_not_begun_is_left_when_an_error_ends_it() -> None:
    begun, go = threading.Event(), threading.Event()

    def first() -> bool:
        begun.set()
        return go.wait(10)

    with pytest.raises(KeyError), Beside("t") as beside:  # noqa: PT012 - the block is what is left by the error
        running, waiting = beside(first), beside(lambda: None)
        assert begun.wait(10)
        threading.Timer(0.1, go.set).start()
        raise KeyError
    assert running.result() is True
    assert waiting.cancelled()
