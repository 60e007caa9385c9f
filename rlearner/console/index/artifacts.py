"""Indexes evaluations, checkpoints and events of ``rlearner up``: files that are read whole."""

from __future__ import annotations

import json
import os
import re
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from rlearner.console.index import followed
from rlearner.console.index.followed import Source
from rlearner.console.index.texts import preview
from rlearner.up.event_log import FILE as EVENTS

EVALS: Final = "evals"
CHECKPOINTS: Final = "checkpoints"
LOGS: Final = "logs"
KINDS: Final = ("start", "stop", "death")  # of lines about a process
_EVALUATION: Final = re.compile(r"(.+)-step-(\d{1,15})\.jsonl")
_CHECKPOINT: Final = re.compile(r"step-(\d{1,15})")
Reader = Callable[[sqlite3.Connection, Source, Path, re.Match[str], os.stat_result], None]


def update(connection: sqlite3.Connection, folder: Path) -> None:
    """Follow the files of these folders."""
    events = re.compile(re.escape(EVENTS))
    _follow_folder(connection, folder, EVALS, pattern=_EVALUATION, read=_read_evaluation)
    _follow_folder(connection, folder, LOGS, pattern=events, read=_read_events)
    _follow_folder(
        connection,
        folder,
        CHECKPOINTS,
        pattern=_CHECKPOINT,
        inside="learner/learner.json",
        read=_read_checkpoint,
    )


def _follow_folder(
    connection: sqlite3.Connection,
    run_folder: Path,
    kind: str,
    *,
    pattern: re.Pattern[str],
    read: Reader,
    inside: str = "",
) -> None:
    folder = run_folder / kind
    sources = followed.sources_of(connection, kind)
    matches: dict[str, tuple[re.Match[str], os.stat_result]] = {}
    for name, match in _matching_files(folder, pattern):
        try:
            matches[name] = match, os.stat(f"{folder}/{name}/{inside}".rstrip("/"))
        except OSError:  # being deleted
            continue
    for name, source in sources.items():
        if name not in matches:
            _remove_rows(connection, source)
            followed.forget(connection, source)
    for name, (match, status) in matches.items():
        source = sources.get(name) or followed.begin(connection, kind, name)
        if source.is_as_seen(status):
            continue
        _remove_rows(connection, source)
        source.ino = status.st_ino
        source.size = status.st_size
        source.mtime = status.st_mtime_ns
        source.whole = True
        read(connection, source, folder / name, match, status)
        followed.save(connection, source)


def _matching_files(folder: Path, pattern: re.Pattern[str]) -> Iterator[tuple[str, re.Match[str]]]:
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        if match := pattern.fullmatch(name):
            yield name, match


def _remove_rows(connection: sqlite3.Connection, source: Source) -> None:
    connection.execute("DELETE FROM evaluated WHERE source = ?", (source.id,))
    connection.execute("DELETE FROM events WHERE source = ?", (source.id,))


def _read_evaluation(
    connection: sqlite3.Connection,
    source: Source,
    path: Path,
    match: re.Match[str],
    status: os.stat_result,
) -> None:
    policy = match[1]
    step = int(match[2])
    position = episodes = successes = 0
    source.problem = ""
    for number, data in enumerate(path.read_bytes().splitlines(keepends=True)):
        start = position
        position = position + len(data)
        try:
            row = json.loads(data)
            tries = [bool(value) for value in row["success"]]
            rewards = [float(value) for value in row["reward"]]
            task = (
                str(row["domain"]),
                int(row["task_index"]),
                len(tries),
                sum(tries),
                sum(rewards),
            )
            preview_columns = (len(row["frames"]), preview(str(row["prompt"])))
        except (ValueError, KeyError, TypeError, RecursionError):
            source.problem = f"{EVALS}/{source.name}: line {number + 1} cannot be read"
            continue
        whole = (source.id, number, start, position, step, policy, *task, *preview_columns)
        connection.execute(
            "INSERT INTO evaluated VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", whole
        )
        episodes = episodes + len(tries)
        successes = successes + sum(tries)
    if episodes:
        text = (
            f"{policy} evaluated after step {step}: success {successes / episodes:.3f} of "
            f"{episodes} episodes"
        )
        _note_event(connection, source, status.st_mtime, step=step, kind="evaluation", text=text)


def _read_checkpoint(
    connection: sqlite3.Connection,
    source: Source,
    path: Path,
    match: re.Match[str],
    status: os.stat_result,
) -> None:
    step = int(match[1])
    text = f"checkpoint of step {step}"
    _note_event(connection, source, status.st_mtime, step=step, kind="checkpoint", text=text)


def _read_events(
    connection: sqlite3.Connection,
    source: Source,
    path: Path,
    match: re.Match[str],
    status: os.stat_result,
) -> None:
    for number, data in enumerate(path.read_bytes().splitlines()):
        try:
            row = json.loads(data)
            time = float(row["time"])
            text = " ".join(str(row["text"]).split())[:500]
        except (ValueError, KeyError, TypeError, RecursionError):
            # Cut off at the begin, or not written to the end.
            continue
        kind = row.get("kind") if row.get("kind") in KINDS else "note"
        _note_event(
            connection,
            source,
            time,
            step=-1,
            kind=kind,
            text=text,
            process=str(row.get("who", ""))[:100],
            key=str(number),
        )


def _note_event(
    connection: sqlite3.Connection,
    source: Source,
    time: float,
    step: int,
    kind: str,
    text: str,
    process: str = "",
    key: str = "",
) -> None:
    row: tuple[Any, ...] = (source.id, key, time, step, kind, text, process)
    connection.execute(
        "INSERT INTO events (source, key, time, step, kind, text, who) VALUES (?, ?, ?, ?, ?, ?, "
        "?)",
        row,
    )


def evaluated_row(folder: Path, name: str, start: int, end: int) -> dict[str, Any]:
    """Return one line of an evaluation's file; empty if the file has changed since."""
    try:
        with (folder / EVALS / name).open("rb") as file:
            file.seek(start)
            row = json.loads(file.read(end - start))
    except (OSError, ValueError):
        return {}
    return row if isinstance(row, dict) else {}
