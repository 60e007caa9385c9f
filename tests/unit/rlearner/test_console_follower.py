"""The thread that keeps a run's index up to date, while disks fill, files break and folders vanish."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import sqlite3
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import index_kit as kit
import pytest
import run_folder_kit as runs

from broker.contract import wire
from broker.errors import UserError
from learner.credit.archive import read_frames
from rlearner.console.index import database, follower
from rlearner.console.index.answers import IndexStatus
from rlearner.console.index.database import DatabaseDamagedError, DatabaseUnavailableError
from rlearner.console.index.follower import RunFollower
from rlearner.console.index.queries import RunQueries
from rlearner.console.index.run_index import RunIndex

WITHIN_S = 20.0


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "POLL_S", 0.02)
    monkeypatch.setattr(follower, "RETRY_S", 0.1)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    asyncio.run(runs.World(tmp_path / "run").learn())
    return tmp_path / "run"


@contextlib.contextmanager
def following(folder: Path, path: Path | None = None) -> Iterator[RunFollower]:
    one = RunFollower(folder, path=path)
    one.start()
    try:
        yield one
    finally:
        one.close()


def until(is_so: Callable[[], Any]) -> None:
    end = time.monotonic() + WITHIN_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def reaches(one: RunFollower, state: str) -> IndexStatus:
    until(lambda: one.status().state == state)
    return one.status()


def append_step(folder: Path, step: int) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "time": 1e9 + step, "reward/mean": step / 10}) + "\n")


def test_a_new_step_is_there_soon(run: Path) -> None:
    with following(run) as one:
        before = reaches(one, "current")
        assert (before.steps, before.done, before.problem, before.notes) == (
            runs.STEPS,
            1.0,
            "",
            (),
        )
        append_step(run, 5)
        began = time.monotonic()
        until(lambda: one.status().steps == 5)
        assert time.monotonic() - began < 1.0
        assert one.queries.series(["reward/mean"])["reward/mean"].values == [0.5]


def test_a_run_without_records_says_so(tmp_path: Path) -> None:
    asyncio.run(runs.World(tmp_path / "run", keep=False).learn())
    with following(tmp_path / "run") as one:
        found = reaches(one, "current")
        assert found.notes == (
            "no trajectories: the run does not keep its records (samples.keep=true keeps them)",
        )
        assert (found.steps, found.trajectories) == (runs.STEPS, 0)
        assert one.queries.provenance(1).text[-1].startswith("  duplicates")


def test_groups_that_are_not_kept(tmp_path: Path) -> None:
    """The index follows the removal: trajectories, and why a group has none."""
    asyncio.run(runs.World(tmp_path / "run", keep=3, steps=12).learn())
    folder = tmp_path / "run" / "samples"
    kept = "the archive keeps the newest 3 groups (samples.keep)"
    with following(tmp_path / "run") as thread:
        status = reaches(thread, "current")
        assert status.notes == (f"trajectories of older groups are no longer there: {kept}",)
        records = [frame.record() for frame in read_frames(folder)]
        groups = [record for record in records if isinstance(record.message, wire.Group)]
        assert status.trajectories == 2 * len(groups)
        with pytest.raises(UserError, match=f"is no longer there: {re.escape(kept)}$"):
            thread.queries.group(1)


def broken_header(path: Path) -> None:
    path.write_bytes(b"no database" + path.read_bytes()[11:])


def cut_in_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty_pages(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(8192)
        file.write(bytes(10 * 8192))


def another_version(path: Path) -> None:
    other = sqlite3.connect(path)
    other.execute("PRAGMA user_version=1")
    other.close()


@pytest.mark.parametrize("damage", [broken_header, cut_in_half, empty_pages, another_version])
def test_a_damaged_index_is_set_aside_and_built_again(
    run: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    expected = kit.rebuilt(run, tmp_path / "expected.sqlite")
    index = RunIndex(run)
    kit.finish(index)
    index.close()
    damage(run / "console.sqlite")
    seen = []
    with following(run) as one:
        until(lambda: seen.append(one.status()) or one.status().state == "current")  # type: ignore[func-returns-value]
    index = RunIndex(run)
    assert kit.contents(index) == expected
    index.close()
    assert (run / "console.damaged.sqlite").exists()
    assert stat.S_IMODE((run / "console.sqlite").stat().st_mode) == 0o600


def test_only_the_database_that_was_found_damaged_is_set_aside(run: Path) -> None:
    RunIndex(run).close()
    path = run / "console.sqlite"
    found = database.identity(path)
    database.move_aside(path, found + 1)  # another console has put a new one there
    assert database.identity(path) == found
    database.move_aside(path, found)
    assert database.identity(path) == 0
    assert database.identity(run / "console.damaged.sqlite") == found


def test_damage_that_an_answer_finds_is_repaired(run: Path) -> None:
    with following(run) as one:
        reaches(one, "current")
        inode = database.identity(one.path)
        one.queries.series(["time"])
        with sqlite3.connect(one.path) as other:  # so that the file has all pages
            other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        empty_pages(one.path)
        fresh = RunQueries(run, one.path, one.queries._damaged)
        with contextlib.suppress(DatabaseDamagedError, sqlite3.DatabaseError):
            while database.identity(one.path) == inode:
                fresh.close()
                fresh.search()
                fresh.series(["time"])
                fresh.provenance(1)
        until(lambda: database.identity(one.path) not in (0, inode))
        reaches(one, "current")
        assert len(one.queries.search().rows) > 0


def test_a_run_that_is_deleted_is_gone_and_comes_back(run: Path, tmp_path: Path) -> None:
    with following(run, tmp_path / "console.sqlite") as one:
        reaches(one, "current")
        shutil.move(run, tmp_path / "elsewhere")
        assert reaches(one, "gone").problem == f"{run} is no longer there"
        shutil.move(tmp_path / "elsewhere", run)
        assert reaches(one, "current").problem == ""


def test_an_index_that_is_deleted_is_built_again(run: Path) -> None:
    with following(run) as one:
        reaches(one, "current")
        before = one.queries.search().rows
        for suffix in ("", "-wal", "-shm"):
            one.path.with_name(one.path.name + suffix).unlink(missing_ok=True)
        append_step(run, 5)
        until(lambda: one.status().steps == 5 and one.path.exists())
        reaches(one, "current")
        assert one.queries.search().rows == before


def test_the_last_room_of_a_disk_is_left_to_the_run(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "RESERVE_BYTES", 2**62)
    with following(run) as one:
        found = reaches(one, "waiting")
        assert "MiB are free" in found.problem
        assert found.problem.endswith("the run is not affected")
        monkeypatch.setattr(database, "RESERVE_BYTES", 0)
        assert reaches(one, "current").steps == runs.STEPS


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", "size=1m,mode=700", "none", str(folder)]
    done = subprocess.run(["mount", *options], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_stops_the_index_until_there_is_room(
    run: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "RESERVE_BYTES", 0)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    (small / "filler").write_bytes(bytes(700_000))
    with following(run, small / "console.sqlite") as one:
        append_many(run, 2000)
        found = reaches(one, "waiting")
        assert "full" in found.problem
        (small / "filler").unlink()
        os.truncate(run / "metrics.jsonl", len(before[run / "metrics.jsonl"]))
        assert reaches(one, "current").steps == runs.STEPS
    assert {path: path.read_bytes() for path in before} == before


def append_many(folder: Path, steps: int) -> None:
    rows = [
        {"step": step, "time": 1e9 + step} | {f"m/{n}": step + 0.5 for n in range(20)}
        for step in range(5, steps)
    ]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


def test_a_transaction_that_does_not_fit_changes_nothing(run: Path) -> None:
    index = RunIndex(run)
    kit.finish(index)
    before = kit.contents(index)
    pages = index.connection.execute("PRAGMA page_count").fetchone()[0]
    index.connection.execute(f"PRAGMA max_page_count={pages}")
    append_many(run, 500)
    with pytest.raises(DatabaseUnavailableError, match="full"):
        index.update()
    assert kit.contents(index) == before
    index.connection.execute("PRAGMA max_page_count=1000000")
    kit.finish(index)
    assert index.counts()[1] == 499
    index.close()


def test_a_folder_that_cannot_be_written_has_its_index_in_the_cache(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    mount = subprocess.run(
        ["mount", "--bind", str(run), str(run)], capture_output=True, check=False
    )
    if mount.returncode:
        pytest.skip(f"a folder cannot be mounted here: {mount.stderr.decode().strip()}")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(run)], check=True)
        with following(run) as one:
            assert reaches(one, "current").steps == runs.STEPS
            assert one.path.is_relative_to(tmp_path / "cache" / "rlearner")
            assert stat.S_IMODE(one.path.stat().st_mode) == 0o600
            assert stat.S_IMODE(one.path.parent.stat().st_mode) == 0o700
    finally:
        subprocess.run(["umount", "-l", str(run)], check=True)
    assert not (run / "console.sqlite").exists()


def test_two_consoles_follow_the_same_run(run: Path) -> None:
    with following(run) as one, following(run) as other:
        for step in range(5, 30):
            append_step(run, step)
            time.sleep(0.005)
        for each in (one, other):
            until(lambda each=each: each.status().steps == 29)
            assert each.queries.series(["reward/mean"])["reward/mean"].steps == list(range(5, 30))
            assert each.status().problem == ""
