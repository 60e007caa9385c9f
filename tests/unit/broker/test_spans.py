"""What a process says that it did, against a clock by hand."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.contract import checks, wire
from broker.errors import WireError
from broker.runtime.spans import MAX_PARTS, MAX_SAMPLES, SpanRecorder

BORN = 1_000.0


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def recorder(self) -> SpanRecorder:
        return SpanRecorder(lambda: self.now, lambda: self.now - 50.0 + BORN)


def told(spans: list[wire.Span]) -> list[tuple[Any, ...]]:
    shown = [
        (one.kind, one.start - BORN, one.end - BORN, one.seconds, one.count)
        for one in spans
        if not one.sample
    ]
    return [(kind, *(round(value, 6) for value in values)) for kind, *values in shown]


def test_work_and_the_time_between_is_told() -> None:
    clock = Clock()
    spans = clock.recorder()
    clock.now = 51.0
    first = spans.enter("generate")
    clock.now = 51.5
    second = spans.enter("generate")
    clock.now = 52.0
    spans.leave("generate", first, ticket=7)
    clock.now = 53.0
    spans.leave("generate", second, ticket=8)
    clock.now = 54.0
    found = spans.take()
    waits = [("wait", 0.0, 1.0, 1.0, 1), ("wait", 3.0, 4.0, 1.0, 0)]
    assert told(found) == [*waits, ("generate", 1.0, 3.0, 2.5, 2)]
    samples = [(one.ticket, one.start - BORN, one.end - BORN) for one in found if one.sample]
    assert samples == [(7, 1.0, 2.0), (8, 1.5, 3.0)]


def test_long_work_is_told_in_parts_that_touch() -> None:
    clock = Clock()
    spans = clock.recorder()
    began = spans.enter("train", step=3)
    parts = []
    for clock.now in (51.0, 52.0):
        parts += spans.take()
    clock.now = 52.5
    spans.leave("train", began, step=3)
    parts += spans.take()
    assert [one for one in told(parts) if one[0] == "train"] == [
        ("train", 0.0, 1.0, 1.0, 0), ("train", 1.0, 2.0, 1.0, 0), ("train", 2.0, 2.5, 0.5, 1),
    ]  # fmt: skip
    assert {one.step for one in parts if one.kind == "train"} == {3}


def test_short_gaps_are_bridged_and_long_ones_are_not() -> None:
    clock = Clock()
    spans = clock.recorder()
    for gap in (0.01, 0.2, 0.01):
        began = spans.enter("reward")
        clock.now += 0.1
        spans.leave("reward", began)
        clock.now += gap
    rewards = [one for one in told(spans.take()) if one[0] == "reward"]
    assert rewards == [("reward", 0.0, 0.21, 0.2, 2), ("reward", 0.41, 0.51, 0.1, 1)]


Piece = tuple[str, float, float]
PIECES = st.lists(
    st.tuples(st.sampled_from(["generate", "env_step"]), st.floats(0.0, 0.5), st.floats(0.0, 0.5)),
    max_size=80,
)


@given(PIECES, st.integers(1, 9))
def test_nothing_is_lost_and_reports_stay_small(pieces: list[Piece], every: int) -> None:
    clock = Clock()
    spans = clock.recorder()
    open_ones: list[tuple[Any, float]] = []
    busy = dict.fromkeys(("generate", "env_step"), 0.0)
    found: list[wire.Span] = []
    for number, (kind, until_next, lasts) in enumerate(pieces):
        open_ones.append((kind, spans.enter(kind)))  # type: ignore[arg-type]
        clock.now += lasts
        if number % 3:
            what, began = open_ones.pop(0)
            spans.leave(what, began, ticket=number)
            busy[what] += clock.now - began
        clock.now += until_next
        if number % every == 0:
            taken = spans.take()
            assert sum(one.sample for one in taken) <= MAX_SAMPLES
            assert len(taken) <= 3 * (MAX_PARTS + 1) + MAX_SAMPLES
            checks.check(wire.Metrics(role="envhub", id="h", time=0.0, values={}, spans=taken))
            found += taken
    for what, began in open_ones:
        spans.leave(what, began)
        busy[what] += clock.now - began
    found += spans.take()
    for kind, seconds in busy.items():
        own = [one for one in found if one.kind == kind and not one.sample]
        assert sum(one.seconds for one in own) == pytest.approx(seconds, abs=1e-6)
        assert sum(one.count for one in own) == sum(piece[0] == kind for piece in pieces)
        assert all(a.end <= b.start + 1e-6 for a, b in pairwise(own))


@pytest.mark.parametrize(
    ("span", "problem"),
    [
        ({"start": 2.0, "end": 1.0}, "2.0 to 1.0; must not end before it starts"),
        ({"seconds": float("nan")}, "Span.seconds: nan"),
        ({"count": -1}, "Span.count: -1"),
    ],
)
def test_a_wrong_span_is_refused(span: dict[str, Any], problem: str) -> None:
    one = wire.Span(**{"kind": "wait", "start": 1.0, "end": 2.0, "seconds": 1.0} | span)
    with pytest.raises(WireError, match=problem):
        checks.check(wire.Metrics(role="envhub", id="h", time=0.0, values={}, spans=[one]))


def test_too_many_spans_are_refused() -> None:
    many = [wire.Span(kind="wait", start=1.0, end=2.0, seconds=1.0)] * 257
    with pytest.raises(WireError, match="257 spans; at most 256"):
        checks.check(wire.Metrics(role="envhub", id="h", time=0.0, values={}, spans=many))
