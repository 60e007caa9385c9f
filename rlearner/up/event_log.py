"""Keeps the events of ``rlearner up``'s processes in ``logs/events.jsonl``, for the console."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

from broker.system.private_files import open_private

FILE: Final = "events.jsonl"
# Of the file; then its older half is cut off.
MAX_BYTES: Final = 2**20


class ProcessEvent(str):
    """A line about a process that ``rlearner up`` started.

    Attributes:
        kind: start, stop (it ended by itself) or death.
        process: name of the process.
    """

    kind: Literal["start", "stop", "death"]
    process: str

    def __new__(
        cls, text: str, kind: Literal["start", "stop", "death"], process: str
    ) -> ProcessEvent:
        event = super().__new__(cls, text)
        event.kind = kind
        event.process = process
        return event


def note_events(logs: Path, texts: Sequence[str]) -> None:
    """Append a line for each text, with the time."""
    if not texts:
        return
    data = "".join(json.dumps(_make_line(text)) + "\n" for text in texts).encode()
    try:
        logs.mkdir(parents=True, exist_ok=True)
        # Private as the logs themselves: a line may quote a model's text.
        file = open_private(logs / FILE, os.O_RDWR | os.O_CREAT)
        try:
            size = os.lseek(file, 0, os.SEEK_END)
            if size > MAX_BYTES:
                newer_half = os.pread(file, size, size // 2).partition(b"\n")[2]
                os.ftruncate(file, 0)
                data = newer_half + data
            os.pwrite(file, data, os.lseek(file, 0, os.SEEK_END))
        finally:
            os.close(file)
    except OSError:
        # A folder that cannot be written must not end the run.
        return


def _make_line(text: str) -> dict[str, Any]:
    line: dict[str, Any] = {"time": round(time.time(), 3), "text": text}
    if isinstance(text, ProcessEvent):
        line |= {"kind": text.kind, "who": text.process}
    return line
