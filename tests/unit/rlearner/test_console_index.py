"""The console's index of a run's folder, against what the files say."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
import run_folder_kit as kit

from broker.errors import ConfigError, UserError
from learner.reporting.metrics import read_lines
from learner.run_folder import RunPlace
from rlearner.console.index.answers import TrajectoryFilter
from rlearner.console.index.queries import RunQueries
from rlearner.console.index.run_index import RunIndex
from rlearner.ops.tracing import ticket_lines, ticket_summary


def built(folder: Path) -> RunQueries:
    index = RunIndex(folder)
    while index.update():
        pass
    index.close()
    return RunQueries(folder)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
async def run(tmp_path: Path) -> Path:
    await kit.World(tmp_path / "run").learn()
    return tmp_path / "run"


async def test_every_ticket_is_what_trace_says(run: Path) -> None:
    queries = built(run)
    place = RunPlace("run", run, {})
    for ticket in range(1, 9):
        expected = ticket_summary(ticket_lines(place, ticket))
        way = queries.provenance(ticket)
        assert (way.state, way.step) == (expected["state"], expected.get("step", 0))
        assert (way.domain, way.task_index) == ("lake", ticket - 1)
        assert expected.get("reason", "") in "\n".join(way.text)
    with pytest.raises(UserError, match="has no ticket 99; its tickets are 1-"):
        queries.provenance(99)


async def test_series_are_the_values_of_metrics_jsonl(run: Path) -> None:
    rows = read_lines(run / "metrics.jsonl")
    queries = built(run)
    found = queries.series(["staleness/max", "ticket/trained", "none"])
    assert list(found) == ["staleness/max", "ticket/trained"]
    for name, one in found.items():
        assert (one.steps, one.values) == (
            [row["step"] for row in rows],
            [row[name] for row in rows],
        )
        assert one.times == [row["time"] for row in rows]
    assert queries.metric_names("TICKET tr") == ["ticket/trained"]
    assert queries.last_values(["ticket/trained"]) == {"ticket/trained": rows[-1]["ticket/trained"]}


async def test_sampled_curves_have_the_mean_of_each_range(run: Path) -> None:
    path = run / "metrics.jsonl"
    rows = read_lines(path)
    last = rows[-1]["step"]
    values = {last + k: [0.0, 1.0, 8.0][k % 3] for k in range(3, 303)}
    more = [{"step": step, "time": float(step), "made/up": value} for step, value in values.items()]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *more]))
    queries = built(run)
    whole = queries.series(["made/up"])["made/up"]
    assert (whole.total, whole.means) == (300, [])
    curve = queries.series(["made/up"], max_points=20)["made/up"]
    assert curve.total == 300
    assert len(curve.steps) == len(curve.means) == 20
    assert [values[step] for step in curve.steps] == curve.values
    assert curve.means == pytest.approx([3.0] * 20)  # where extremes alone would have 4


async def test_evaluations_are_drawn_at_their_own_step(run: Path) -> None:
    path = run / "metrics.jsonl"
    rows = read_lines(path)
    rows[-1] |= {"eval/step": 1.0, "eval/success_rate": 0.25}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    curve = built(run).series(["eval/success_rate"])["eval/success_rate"]
    assert (curve.steps, curve.times, curve.values) == ([1], [rows[-1]["time"]], [0.25])


async def test_trajectories_are_found_by_what_they_are(run: Path) -> None:
    queries = built(run)
    every = queries.search(limit=1000, count=True)
    assert every.total == len(every.rows) == 2 * len({row.seq for row in every.rows})
    trained = queries.search(TrajectoryFilter(min_step=2, max_step=3), limit=1000).rows
    assert {row.step for row in trained} == {2, 3}
    assert {row.state for row in trained} == {"trained"}
    solved = queries.search(TrajectoryFilter(min_reward=0.5), order="oldest", limit=1000).rows
    assert all(row.success and row.reward == 1.0 and row.episode == 1 for row in solved)
    assert [row.seq for row in solved] == sorted(row.seq for row in solved)
    twice = queries.search(TrajectoryFilter(state="duplicate")).rows
    place = RunPlace("run", run, {})
    known = {
        seq
        for ticket in (1, 2)
        for seq in ticket_summary(ticket_lines(place, ticket))["duplicates"]
    }
    assert {row.seq for row in twice} == known
    assert known


@pytest.mark.parametrize("order", ["newest", "reward_high", "shortest", "stalest"])
async def test_pages_hold_everything_once(run: Path, order: Any) -> None:
    queries = built(run)
    whole = [row.id for row in queries.search(order=order, limit=1000).rows]
    pages, after = [], ""
    while True:
        page = queries.search(order=order, limit=3, after=after)
        pages += [row.id for row in page.rows]
        if not (after := page.after):
            break
    assert pages == whole
    assert len(set(pages)) == len(pages)
    with pytest.raises(ConfigError, match="after: 'x'"):
        queries.search(after="x")


async def test_the_database_is_private_and_the_folder_is_not_changed(run: Path) -> None:
    before = contents(run)
    built(run).series(["time"])
    assert stat.S_IMODE((run / "console.sqlite").stat().st_mode) == 0o600
    after = contents(run)
    assert {path: after[path] for path in before} == before
    assert {path.name for path in after.keys() - before.keys()} <= {
        f"console.sqlite{s}" for s in ("", "-wal", "-shm")
    }
