"""However a run's files change between two updates, the index is the one that is built from
nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import index_kit as kit
import pytest
import run_folder_kit as runs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from broker.contract import wire
from rlearner.console.index import followed, records
from rlearner.console.index.run_index import RunIndex


@pytest.fixture(autouse=True)
def small_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads a little at a time, so that changes meet a build in the middle."""
    monkeypatch.setattr(followed, "READ_BYTES", 1500)
    monkeypatch.setattr(records, "ROUND_BYTES", 1500)


def texts(ticket: wire.Ticket) -> list[wire.Message | bytes]:
    """Of everything something, and texts to search."""
    found: list[wire.Message | bytes] = []
    for one in runs.eventful(ticket):
        if isinstance(one, wire.Group):
            said = [replace(trajectory, response="go left") for trajectory in one.trajectories]
            one = replace(one, trajectories=said, prompt=f"task {ticket.number}")
        found.append(one)
    return found


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The folder of one run at several moments: as learners died, took over, cut files and went on."""
    base = tmp_path_factory.mktemp("lives")
    world = runs.World(base / "run", texts, segment_bytes=700, steps=8)
    found = []
    for die_at in (5, 11, 14, 19, 0):
        with contextlib.suppress(runs.Killed):
            asyncio.run(world.learn(die_at=die_at, checkpoint_every=3))
        evals = base / "run" / "evals"
        evals.mkdir(exist_ok=True)
        row = {
            "domain": "lake",
            "task_index": 1,
            "success": [True, False],
            "reward": [1.0, 0.0],
            "frames": ["a"],
        }
        rows = [row | {"prompt": f"task {number}"} for number in range(3)]
        (evals / f"actor-step-{len(found):06d}.jsonl").write_text(
            "".join(json.dumps(one) + "\n" for one in rows)
        )
        found.append(shutil.copytree(base / "run", base / f"life{len(found)}"))
    return found


KINDS = ("cut", "garbage", "flip", "delete", "replace_cut", "life", "half_line", "touch")
OPERATION = st.tuples(
    st.sampled_from(KINDS), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 3)
)


def change(files: kit.Files, lives: list[Path], kind: str, which: int, where: int) -> None:
    """Do something to one of the files."""
    there = files.all()
    if kind == "life" or not there:
        files.copy_from(lives[which % len(lives)])
        return
    path = there[which % len(there)]
    data = path.read_bytes()
    place = where % (len(data) + 1)
    if kind == "cut":
        files.edit(path, lambda data: data.__delitem__(slice(place, None)))
    elif kind == "garbage":
        files.edit(path, lambda data: data.extend(b"\x00{}\n" * (1 + where % 20)))
    elif kind == "half_line":
        files.edit(path, lambda data: data.extend(b'{"step": 1, "x'))
    elif kind == "flip" and data:
        files.edit(
            path,
            lambda data: data.__setitem__(
                place % len(data), data[place % len(data)] ^ (1 + where % 255)
            ),
        )
    elif kind == "delete":
        path.unlink()
    elif kind == "replace_cut":
        files.replace(path, data[:place])
    else:
        files.touched(path)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(OPERATION, min_size=1, max_size=12))
def test_any_changes_lead_to_the_index_of_a_rebuild(
    tmp_path_factory: pytest.TempPathFactory,
    lives: list[Path],
    operations: list[tuple[str, int, int, int]],
) -> None:
    folder = tmp_path_factory.mktemp("changed") / "run"
    shutil.copytree(lives[0], folder)
    files, index = kit.Files(folder), RunIndex(folder)
    try:
        for kind, which, where, rounds in operations:
            change(files, lives, kind, which, where)
            for _ in range(rounds):
                index.update()
        kit.finish(index)
        found, expected = kit.contents(index), kit.rebuilt(folder, folder.parent / "rebuilt.sqlite")
        for name, rows in expected.items():
            assert found[name] == rows, name
    finally:
        index.close()
        shutil.rmtree(folder.parent)


def test_the_lives_of_a_run_one_after_the_other(tmp_path: Path, lives: list[Path]) -> None:
    folder = tmp_path / "run"
    files, index = kit.Files(folder), None
    counts = []
    for life in lives:
        files.copy_from(life)
        index = index or RunIndex(folder)
        kit.finish(index)
        expected = kit.rebuilt(folder, tmp_path / "rebuilt.sqlite")
        assert kit.contents(index) == expected
        counts.append(len(expected["trajectories"]))
    assert index is not None
    index.close()
    assert counts[-1] == max(counts) > 20
    assert counts != sorted(counts) or len(set(counts)) > 3


def _index_forever(folder: Path) -> None:
    followed.READ_BYTES, records.ROUND_BYTES = 300, 300  # type: ignore[misc]
    index = RunIndex(folder)
    while index.update():
        pass
    os._exit(0)


def test_an_indexer_killed_at_any_moment_loses_and_repeats_nothing(
    tmp_path: Path, lives: list[Path]
) -> None:
    folder = shutil.copytree(lives[-1], tmp_path / "run")
    spawn, chance, killed = multiprocessing.get_context("fork"), random.Random(7), 0
    for _ in range(40):
        indexer = spawn.Process(target=_index_forever, args=(folder,))
        indexer.start()
        time.sleep(chance.uniform(0.001, 0.03))
        if indexer.pid is not None and indexer.is_alive():
            os.kill(indexer.pid, signal.SIGKILL)
        indexer.join()
        killed += indexer.exitcode == -signal.SIGKILL
    assert killed >= 5
    index = RunIndex(folder)
    index.check()
    kit.finish(index)
    assert kit.contents(index) == kit.rebuilt(folder, tmp_path / "rebuilt.sqlite")
    index.close()


def test_two_indexers_at_once_read_everything_once(tmp_path: Path, lives: list[Path]) -> None:
    folder = shutil.copytree(lives[-1], tmp_path / "run")
    spawn = multiprocessing.get_context("fork")
    both = [spawn.Process(target=_index_forever, args=(folder,)) for _ in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert [one.exitcode for one in both] == [0, 0]
    index = RunIndex(folder)
    found: dict[str, list[Any]] = kit.contents(index)
    index.close()
    assert found == kit.rebuilt(folder, tmp_path / "rebuilt.sqlite")


def test_a_copy_that_differs_far_from_its_end_is_noticed(
    tmp_path: Path, lives: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followed, "GUARD_BYTES", 16)
    folder = shutil.copytree(lives[-1], tmp_path / "run")
    files, index = kit.Files(folder), RunIndex(folder)
    kit.finish(index)
    path = folder / "metrics.jsonl"
    data = path.read_bytes()
    files.replace(
        path, data.replace(b'"step": 1,', b'"step": 9,', 1) + data.splitlines(keepends=True)[-1]
    )
    kit.finish(index)
    assert index.connection.execute("SELECT step FROM steps ORDER BY end").fetchone() == (9,)
    assert kit.contents(index) == kit.rebuilt(folder, tmp_path / "rebuilt.sqlite")
    index.close()


def test_of_two_files_with_the_same_records_the_newer_one_counts(
    tmp_path: Path, lives: list[Path]
) -> None:
    folder = shutil.copytree(lives[-1], tmp_path / "run")
    older, newer = sorted((folder / "samples").glob("*.frames"))[:2]
    first, rest = int(newer.stem), newer.read_bytes()
    files, index = kit.Files(folder), RunIndex(folder)
    newer.unlink()
    # a learner that was taken over went on writing
    files.edit(older, lambda data: data.extend(rest))
    kit.finish(index)
    files.replace(newer, rest)
    kit.finish(index)
    names = "SELECT s.name FROM frames f JOIN sources s ON s.id = f.source WHERE f.seq >= ? ORDER BY f.seq"
    assert older.name not in {name for (name,) in index.connection.execute(names, (first,))}
    assert kit.contents(index) == kit.rebuilt(folder, tmp_path / "rebuilt.sqlite")
    index.close()
