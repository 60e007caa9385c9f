"""The timeline: spans that processes reported, and the learner's phases."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from broker.contract import wire
from rlearner.console.index import live_spans
from rlearner.console.index.answers import Timeline, TimelineSpan
from rlearner.console.index.live_spans import LiveSpans
from rlearner.console.index.queries import RunQueries
from rlearner.console.index.run_index import RunIndex

T = 1_700_000_000.0
LEARNER = "learner.learner"


class Run:
    """A folder whose steps take ten seconds each, and reports at a clock by hand."""

    def __init__(self, folder: Path, steps: int) -> None:
        folder.mkdir()
        (folder / "config.yaml").write_text("run: {name: run}\n")
        rows = [self.row(step) for step in range(1, steps + 1)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.now, self.folder = T, folder
        self.live = LiveSpans(lambda: self.now)
        self.live.listening(True)

    def row(self, step: int) -> dict[str, Any]:
        phases = {"time/step": 10.0, "time/train": 6.0, "time/offer_weights": 1.0}
        return {"step": step, "time": T + 10.0 * step, **phases}

    def report(self, process: str, *spans: wire.Span, **more: Any) -> None:
        role = process.split("-")[0]
        self.live.add(
            wire.Metrics(role=role, id=process, time=self.now, values={}, spans=list(spans), **more)
        )

    def queries(self) -> RunQueries:
        index = RunIndex(self.folder, live=self.live)
        self.now += live_spans.FLUSH_S
        while index.update():
            pass
        index.close()
        return RunQueries(self.folder)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run", 3)


def seconds(timeline: Timeline) -> dict[tuple[str, str], float]:
    sums: dict[tuple[str, str], float] = defaultdict(float)
    for one in timeline.spans:
        if not one.sample:
            sums[one.lane, one.kind] += one.seconds
    return dict(sums)


def span(kind: Any, start: float, end: float, busy: float | None = None, **more: Any) -> wire.Span:
    return wire.Span(
        kind=kind,
        start=T + start,
        end=T + end,
        seconds=end - start if busy is None else busy,
        **more,
    )


def test_the_learners_phases_follow_from_its_metrics(run: Run) -> None:
    queries = run.queries()
    assert queries.extent() == (T, T + 30.0)
    found = queries.spans(T + 11.0, T + 19.0)
    wait, train, weights = ("wait", 10.0, 13.0), ("train", 13.0, 19.0), ("weights", 19.0, 20.0)
    assert [(one.kind, one.start - T, one.end - T) for one in found.spans] == [wait, train, weights]
    assert {(one.lane, one.step) for one in found.spans} == {(LEARNER, 2)}
    assert (found.bucket_s, found.live_since) == (0.0, 0.0)


def test_reports_replace_the_phases_where_there_are_some(run: Run) -> None:
    run.now = T + 20.0
    run.report("learner", span("train", 10.0, 15.0, step=2), span("wait", 15.0, 20.0))
    found = run.queries().spans(T, T + 30.0)
    assert [one.step for one in found.spans if one.kind == "weights"] == [1, 3]
    assert seconds(found)[LEARNER, "train"] == 6.0 + 5.0 + 6.0
    assert found.live_since == T + 10.0


def test_work_without_a_break_is_one_span(run: Run) -> None:
    for second in range(100):
        run.now = T + second + 1
        run.report(
            "rollout-1",
            span("generate", second, second + 1, 7.5, count=3),
            span("wait", second, second + 1),
        )
    found = run.queries().spans(T, T + 100.0)
    waits = [one for one in found.spans if one.kind == "wait" and one.lane != LEARNER]
    assert [round(one.end - one.start) for one in waits] == [60, 40]
    assert len([one for one in found.spans if one.kind == "generate"]) == 100
    assert seconds(found)["rollout.rollout-1", "generate"] == 750.0


@pytest.mark.parametrize("most", [2000, 300, 40])
@pytest.mark.parametrize("resolution", [0.0, 30.0])
def test_added_up_spans_are_few_and_lose_nothing(
    tmp_path: Path, most: int, resolution: float
) -> None:
    run = Run(tmp_path / "run", 1000)
    for second in range(0, 4000, 2):
        run.now = T + second + 2
        run.report(
            "envhub-1",
            span("generate", second, second + 2, 30.0, count=5),
            span("env_step", second, second + 1),
        )
    found = run.queries().spans(T, T + 10_000.0, resolution, most)
    assert len(found.spans) <= most
    assert found.bucket_s >= max(resolution, 1.0)
    total = seconds(found)
    assert total["envhub.envhub-1", "generate"] == pytest.approx(60_000.0)
    assert total["envhub.envhub-1", "env_step"] == pytest.approx(2_000.0)
    assert total[LEARNER, "train"] == pytest.approx(6_000.0)
    assert total[LEARNER, "wait"] == pytest.approx(3_000.0)
    assert sum(one.count for one in found.spans if one.kind == "generate") == 10_000
    assert all(one.end - one.start == pytest.approx(found.bucket_s) for one in found.spans)
    assert found.lanes == [LEARNER, "envhub.envhub-1"]


def test_old_spans_make_room_and_their_sums_stay(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_spans, "MAX_ROWS", 100)
    monkeypatch.setattr(live_spans, "PRUNE_EVERY", 2)
    for second in range(300):
        run.now = T + second + 1
        run.report("rollout-1", span("generate", second, second + 1, 2.0))
        if second % 100 == 99:
            queries = run.queries()
    near, whole = queries.spans(T + 280.0, T + 300.0), queries.spans(T - 1, T + 301.0)
    assert (near.bucket_s, whole.bucket_s) == (0.0, 8)
    # with the one that ends as the range begins
    assert seconds(near)["rollout.rollout-1", "generate"] == 42.0
    assert seconds(whole)["rollout.rollout-1", "generate"] == pytest.approx(600.0)
    assert T - 8 <= whole.live_since <= T


def test_a_clock_that_is_wrong_is_ignored_and_counted(run: Run) -> None:
    run.report(
        "rollout-1",
        span("wait", -90_000.0, 0.0),
        span("wait", 0.0, 9_000.0),
        span("wait", -1.0, 0.0),
    )
    found = run.queries().spans(T - 100_000.0, T + 100_000.0)
    assert [(one.start, one.end) for one in found.spans if one.lane != LEARNER] == [(T - 1.0, T)]
    assert run.live.lost == 2


def test_processes_that_come_fail_and_go_are_events(run: Run) -> None:
    run.report("envhub-1")
    run.report("learner", text={"failure": "", "failed_by": ""})
    run.now += 10
    failed = {"failure": "env_error: KeyError\nlake", "failed_by": "envhub-1"}
    run.report("learner", text=failed)
    run.report("learner", text=failed)
    run.now += 10
    events = [
        (one.time - T, one.kind, one.who)
        for one in run.queries().events(kinds=("joined", "left", "failed"))
    ]
    joined = [(0.0, "joined", "envhub-1"), (0.0, "joined", "learner")]
    assert events == [
        (0.0, "joined", "envhub-1"),
        (0.0, "joined", "learner"),
        (0.0, "left", "envhub-1"),
        (10.0, "failed", "envhub-1"),
    ]
    assert joined == events[:2]


def came_and_went(run: Run) -> list[tuple[float, str, str]]:
    found = run.queries().events(kinds=("joined", "left"))
    return [(one.time - T, one.kind, one.who) for one in found]


def test_the_last_process_that_leaves_is_noted_without_another_report(run: Run) -> None:
    run.report("envhub-1")
    run.queries()
    run.now += live_spans.SILENT_S
    assert came_and_went(run) == [(0.0, "joined", "envhub-1"), (0.0, "left", "envhub-1")]


def test_who_is_not_heard_while_nothing_is_heard_has_not_left(run: Run) -> None:
    run.report("envhub-1")
    run.report("envhub-2")
    run.live.listening(False)
    run.now = T + 600
    joined = [(0.0, "joined", "envhub-1"), (0.0, "joined", "envhub-2")]
    assert came_and_went(run) == joined
    run.now = T + 700
    run.live.listening(True)
    run.report("envhub-1")
    run.now = T + 710
    run.report("envhub-1")
    assert came_and_went(run) == joined
    run.now = T + 716
    assert came_and_went(run) == [*joined, (700.0, "left", "envhub-2")]


def test_events_of_processes_make_room(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_spans, "MAX_EVENTS", 5)
    monkeypatch.setattr(live_spans, "PRUNE_EVERY", 2)
    monkeypatch.setattr(live_spans, "FLUSH_S", 0.0)
    index = RunIndex(run.folder, live=run.live)
    for number in range(1, 10):
        run.now = T + number
        run.report(f"envhub-{number}")
        index.update()
    assert index.connection.execute(
        "SELECT who FROM events WHERE source = 0 ORDER BY time"
    ).fetchall() == [(f"envhub-{number}",) for number in range(5, 10)]
    index.close()


def test_the_newest_events_of_a_range_are_read_alone(run: Run) -> None:
    for number in range(1, 9):
        run.now = T + number
        run.report(f"envhub-{number}")
    queries = run.queries()
    assert [one.who for one in queries.events(kinds=("joined",), newest=2)] == [
        "envhub-7",
        "envhub-8",
    ]
    assert [one.who for one in queries.events(T + 2, T + 3)] == ["envhub-2", "envhub-3"]


def test_a_second_console_adds_nothing(run: Run) -> None:
    whole = (
        TimelineSpan("rollout.rollout-1", "generate", T - 3.0, T - 1.0, 2.0, 0),
        TimelineSpan("rollout.rollout-1", "wait", T - 1, T, 1.0, 0),
    )
    reports = [
        (-2.0, span("generate", -3.0, -2.0)),
        (-1.0, span("generate", -2.0, -1.0)),
        (0.0, span("wait", -1.0, 0.0)),
    ]
    for count in (2, 3):
        run.live = LiveSpans(lambda: run.now)
        for run.now, one in ((T + at, one) for at, one in reports[:count]):
            run.report("rollout-1", one)
        queries = run.queries()
    for found in (queries.spans(T - 10, T), queries.spans(T - 10, T, 8.0, 6)):
        assert seconds(found) == {(one.lane, one.kind): one.seconds for one in whole} | {
            key: value for key, value in seconds(found).items() if key[0] == LEARNER
        }
    assert [one for one in queries.spans(T - 10, T).spans if one.lane != LEARNER] == list(whole)
