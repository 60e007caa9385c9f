"""Reads the logs of ``rlearner up``: one file per process with its rotated ones, merged by time and
followed.
"""

from __future__ import annotations

import heapq
import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, Final

from broker.system.log_rotation import KEPT

LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_LINE: Final = re.compile(
    r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}) (DEBUG|INFO|WARNING|ERROR|CRITICAL) (\S+) (\S+) (\S+) ?(.*)",
    re.DOTALL,
)
_SERVER_LINE: Final = re.compile(
    r"\[\d+\] (\d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d{6}) \[(...)\] (.*)", re.DOTALL
)
_SERVER_LEVELS: Final = {
    "TRC": "DEBUG",
    "DBG": "DEBUG",
    "INF": "INFO",
    "WRN": "WARNING",
    "ERR": "ERROR",
    "FTL": "ERROR",
}
_FATAL: Final = ("error: ", "Fatal Python error: ")  # begin an entry that has no time of its own


@dataclass
class LogEntry:
    """One record of a log, with the lines below it.

    Attributes:
        time: seconds since 1970; of the record before it where it has none, 0 at the start of a
            file.
        process: name of the file, for example ``envhub``.
        message: with the fields that follow it.
        below: lines without a time of their own, such as a traceback.
    """

    time: float
    level: str
    process: str
    message: str
    run: str = ""
    role: str = ""
    id: str = ""
    below: list[str] = field(default_factory=list)


class LogParser:
    """Parser of one process's lines, as text, as JSON, or as nats-server writes them."""

    def __init__(self, process: str) -> None:
        self._process = process
        self._last = LogEntry(0.0, "INFO", process, "")

    def parse(self, lines: Iterable[str]) -> Iterator[LogEntry]:
        """Yield the entries of some lines; lines that continue an entry of an earlier call are an
        entry.
        """
        entry: LogEntry | None = None
        for line in lines:
            begun = self._begun(line)
            if begun is None and entry is not None:
                entry.below.append(line)
                continue
            if entry is not None:
                yield entry
            entry = self._last = begun or LogEntry(
                self._last.time, self._last.level, self._process, line
            )
        if entry is not None:
            yield entry

    def _begun(self, line: str) -> LogEntry | None:
        """Return the entry that begins with a line, None if the line continues one."""
        if found := _LINE.fullmatch(line):
            at = _local(found[1])
            return LogEntry(at, found[2], self._process, found[6], found[3], found[4], found[5])
        if line.startswith('{"time"'):
            with suppress(ValueError, KeyError, TypeError, AttributeError):
                return self._of_json(json.loads(line))
        if found := _SERVER_LINE.fullmatch(line):
            level = _SERVER_LEVELS.get(found[2], "INFO")
            return LogEntry(_local(found[1]), level, self._process, found[3])
        if line.startswith(_FATAL):
            return LogEntry(self._last.time, "ERROR", self._process, line)
        return None

    def _of_json(self, record: dict[str, object]) -> LogEntry:
        extra = record.get("extra") or {}
        assert isinstance(extra, dict)
        message = " ".join(
            [str(record["message"]), *(f"{key}={value}" for key, value in extra.items())]
        )
        run, role, name = (str(record.get(name, "")) for name in ("run", "role", "id"))
        at = datetime.fromisoformat(str(record["time"])).timestamp()
        below = str(record.get("traceback", "")).splitlines()
        return LogEntry(at, str(record["level"]), self._process, message, run, role, name, below)


@lru_cache(maxsize=1024)
def _second(text: str) -> float:
    return datetime.strptime(text.replace("/", "-"), "%Y-%m-%d %H:%M:%S").timestamp()


def _local(text: str) -> float:
    """Return a time of this machine, as logging and nats-server write it, in seconds since 1970."""
    return _second(text[:19]) + float(f"0{text[19:]}")


class LogFile:
    """The log of one process: its rotated files and its present one are read once, then followed.

    Args:
        path: of the present file, which need not exist yet.
    """

    def __init__(self, path: Path, process: str) -> None:
        self.path = path
        self.process = process
        self._parser = LogParser(process)
        self._file: BinaryIO | None = None
        self._rest = b""  # of a line that is being written
        self._open()

    def close(self) -> None:
        """Close the present file."""
        if self._file is not None:
            self._file.close()

    def entries(self, since: float = 0.0) -> Iterator[LogEntry]:
        """Yield what is there now, oldest first, from a time on."""
        return (entry for entry in self._parser.parse(self._lines(since)) if entry.time >= since)

    def news(self) -> list[LogEntry]:
        """Return what was written since the last call, across rotations and a new start."""
        return list(self._parser.parse(self._new_lines()))

    def _open(self) -> None:
        self.close()
        self._file = None
        with suppress(OSError):
            self._file = self.path.open("rb")

    def _lines(self, since: float) -> Iterator[str]:
        mine = _identity(self._file)
        for older in self._rotated():
            with suppress(OSError), older.open("rb") as file:
                if _identity(file) != mine and os.fstat(file.fileno()).st_mtime >= since:
                    yield from (_text(line) for line in file)
        if self._file is not None:
            for line in self._file:
                if not line.endswith(b"\n"):
                    self._rest = line
                    return
                yield _text(line)

    def _rotated(self) -> list[Path]:
        """Return the paths of older files, oldest first."""
        return [Path(f"{self.path}.{number}") for number in range(KEPT, 0, -1)]

    def _new_lines(self) -> list[str]:
        lines = self._drain()
        try:
            there = self.path.stat()
        except OSError:
            return lines
        if self._file is not None and (there.st_dev, there.st_ino) == _identity(self._file):
            if there.st_size < self._file.tell():  # emptied
                self._file.seek(0)
                self._rest = b""
                lines += self._drain()
            return lines
        mine = _identity(self._file)
        lines += self._drain()  # written between the first read and the rotation
        older = [path for path in self._rotated() if path.exists()]
        known = [path for path in older if mine is not None and _identity_of(path) == mine]
        for path in older[older.index(known[0]) + 1 :] if known else []:  # rotated more than once
            with suppress(OSError):
                lines += [_text(line) for line in path.read_bytes().splitlines()]
        if self._rest:  # the last line of the old file has no end
            lines.append(_text(self._rest))
            self._rest = b""
        self._open()
        return lines + self._drain()

    def _drain(self) -> list[str]:
        if self._file is None:
            return []
        *whole, self._rest = (self._rest + self._file.read()).split(b"\n")
        return [_text(line) for line in whole]


def _identity(file: BinaryIO | None) -> tuple[int, int] | None:
    if file is None:
        return None
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino


def _identity_of(path: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        found = path.stat()
        return found.st_dev, found.st_ino
    return None


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace").rstrip("\r\n")


def merged(files: Iterable[LogFile], since: float = 0.0) -> Iterator[LogEntry]:
    """Yield the entries of several logs by time."""
    return heapq.merge(*(file.entries(since) for file in files), key=lambda entry: entry.time)


def parse_since(text: str) -> float:
    """Return the time that a user names, in seconds since 1970.

    Args:
        text: how long ago (``10m``), a time of today (``14:30``), or a date with or without a time.

    Raises:
        ValueError: if it is none of these.
    """
    if found := re.fullmatch(r"(\d{1,6})([smhd])", text):
        return time.time() - int(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86_400}[found[2]]
    moment = text
    if re.fullmatch(r"\d{1,2}:\d\d(:\d\d)?", text):
        moment = f"{datetime.now():%Y-%m-%d} {text if text[2] == ':' else f'0{text}'}"
    try:
        return datetime.fromisoformat(moment).timestamp()
    except ValueError:
        allowed = "how long ago (90s, 10m, 2h, 1d), a time (14:30), or a date and a time (2026-11-25 14:30)"
        raise ValueError(f"{text!r} is not allowed; {allowed}") from None
