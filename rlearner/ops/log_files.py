"""Reads the logs of ``rlearner up``, with rotated files: merges them by time and follows them."""

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

from broker.system.log_rotation import MAX_OLD_FILES

LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_LINE: Final = re.compile(
    r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}) (DEBUG|INFO|WARNING|ERROR|CRITICAL) "
    r"(\S+) (\S+) (\S+) ?(.*)",
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
# Beginnings of entries that have no time of their own.
_FATAL: Final = ("error: ", "Fatal Python error: ")


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
        """Yield the entries of lines; lines that continue an earlier call's entry are an entry."""
        entry: LogEntry | None = None
        for line in lines:
            new_entry = self._parse_first_line(line)
            if new_entry is None and entry is not None:
                entry.below.append(line)
                continue
            if entry is not None:
                yield entry
            entry = self._last = new_entry or LogEntry(
                self._last.time, self._last.level, self._process, line
            )
        if entry is not None:
            yield entry

    def _parse_first_line(self, line: str) -> LogEntry | None:
        """Return the entry that begins with a line, None if the line continues one."""
        if match := _LINE.fullmatch(line):
            time_text, level, run, role, name, message = match.groups()
            at = _parse_time(time_text)
            return LogEntry(at, level, self._process, message, run=run, role=role, id=name)
        if line.startswith('{"time"'):
            with suppress(ValueError, KeyError, TypeError, AttributeError):
                return self._parse_json(json.loads(line))
        if match := _SERVER_LINE.fullmatch(line):
            time_text, abbreviation, message = match.groups()
            level = _SERVER_LEVELS.get(abbreviation, "INFO")
            return LogEntry(_parse_time(time_text), level, self._process, message)
        if line.startswith(_FATAL):
            return LogEntry(self._last.time, "ERROR", self._process, line)
        return None

    def _parse_json(self, record: dict[str, object]) -> LogEntry:
        extra = record.get("extra") or {}
        assert isinstance(extra, dict)
        message = " ".join(
            [str(record["message"]), *(f"{key}={value}" for key, value in extra.items())]
        )
        return LogEntry(
            datetime.fromisoformat(str(record["time"])).timestamp(),
            str(record["level"]),
            self._process,
            message,
            run=str(record.get("run", "")),
            role=str(record.get("role", "")),
            id=str(record.get("id", "")),
            below=str(record.get("traceback", "")).splitlines(),
        )


# strptime is slow, and busy logs have many lines of the same second.
@lru_cache(maxsize=1024)
def _parse_second(text: str) -> float:
    return datetime.strptime(text.replace("/", "-"), "%Y-%m-%d %H:%M:%S").timestamp()


def _parse_time(text: str) -> float:
    """Return a time of this machine, as logging and nats-server write it, in seconds since 1970."""
    return _parse_second(text[:19]) + float(f"0{text[19:]}")


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
        self._tail = b""  # of a line that is being written
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
        own_identity = _file_identity(self._file)
        for older in self._rotated():
            # A file may be rotated while these are read; the open one is read below.
            with suppress(OSError), older.open("rb") as file:
                if (
                    _file_identity(file) != own_identity
                    and os.fstat(file.fileno()).st_mtime >= since
                ):
                    yield from (_decode_line(line) for line in file)
        if self._file is not None:
            for line in self._file:
                if not line.endswith(b"\n"):
                    self._tail = line
                    return
                yield _decode_line(line)

    def _rotated(self) -> list[Path]:
        """Return the paths of older files, oldest first."""
        return [Path(f"{self.path}.{number}") for number in range(MAX_OLD_FILES, 0, -1)]

    def _new_lines(self) -> list[str]:
        lines = self._drain()
        try:
            status = self.path.stat()
        except OSError:
            return lines
        if self._file is not None and (status.st_dev, status.st_ino) == _file_identity(self._file):
            if status.st_size < self._file.tell():  # emptied
                self._file.seek(0)
                self._tail = b""
                lines += self._drain()
            return lines
        lines += self._drain()  # written between the first read and the rotation
        for path in self._files_since_rotation():
            with suppress(OSError):
                lines += [_decode_line(line) for line in path.read_bytes().splitlines()]
        if self._tail:  # the last line of the old file has no end
            lines.append(_decode_line(self._tail))
            self._tail = b""
        self._open()
        return lines + self._drain()

    def _files_since_rotation(self) -> list[Path]:
        """Return the rotated files newer than the open one: it may have rotated more than once."""
        own_identity = _file_identity(self._file)
        if own_identity is None:
            return []
        older = [path for path in self._rotated() if path.exists()]
        for index, path in enumerate(older):
            if _path_identity(path) == own_identity:
                return older[index + 1 :]
        return []

    def _drain(self) -> list[str]:
        if self._file is None:
            return []
        *whole, self._tail = (self._tail + self._file.read()).split(b"\n")
        return [_decode_line(line) for line in whole]


def _file_identity(file: BinaryIO | None) -> tuple[int, int] | None:
    if file is None:
        return None
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino


def _path_identity(path: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        status = path.stat()
        return status.st_dev, status.st_ino
    return None


def _decode_line(line: bytes) -> str:
    return line.decode("utf-8", "replace").rstrip("\r\n")


def merge_logs(files: Iterable[LogFile], since: float = 0.0) -> Iterator[LogEntry]:
    """Yield the entries of several logs by time."""
    return heapq.merge(*(file.entries(since) for file in files), key=lambda entry: entry.time)


def parse_since(text: str) -> float:
    """Return the time that a user names, in seconds since 1970.

    Args:
        text: how long ago (``10m``), a time of today (``14:30``), or a date with or without a time.

    Raises:
        ValueError: if it is none of these.
    """
    if match := re.fullmatch(r"(\d{1,6})([smhd])", text):
        unit_s = {"s": 1, "m": 60, "h": 3600, "d": 86_400}[match[2]]
        return time.time() - int(match[1]) * unit_s
    moment = text
    if re.fullmatch(r"\d{1,2}:\d\d(:\d\d)?", text):
        moment = f"{datetime.now():%Y-%m-%d} {text if text[2] == ':' else f'0{text}'}"
    try:
        return datetime.fromisoformat(moment).timestamp()
    except ValueError:
        allowed = (
            "how long ago (90s, 10m, 2h, 1d), a time (14:30), "
            "or a date and a time (2026-11-25 14:30)"
        )
        raise ValueError(f"{text!r} is not allowed; {allowed}") from None
