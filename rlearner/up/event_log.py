"""Keeps what happened to the processes of ``rlearner up`` in ``logs/events.jsonl``, for the
console.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

from broker.system.private_files import open_private

FILE: Final = "events.jsonl"
MAX_BYTES: Final = 2**20  # then the older half is cut off


class ProcessEvent(str):
    """A line about a process that ``rlearner up`` started.

    Attributes:
        kind: start, stop (it ended by itself) or death.
        who: name of the process.
    """

    kind: Literal["start", "stop", "death"]
    who: str

    def __new__(cls, text: str, kind: Literal["start", "stop", "death"], who: str) -> ProcessEvent:
        made = super().__new__(cls, text)
        made.kind = kind
        made.who = who
        return made


def note_events(logs: Path, texts: Sequence[str]) -> None:
    """Append a line for each text, with the time; a folder that cannot be written must not end the
    run.
    """
    if not texts:
        return
    data = "".join(json.dumps(_line(text)) + "\n" for text in texts).encode()
    try:
        logs.mkdir(parents=True, exist_ok=True)
        file = open_private(logs / FILE, os.O_RDWR | os.O_CREAT)
        try:
            size = os.lseek(file, 0, os.SEEK_END)
            if size > MAX_BYTES:
                kept = os.pread(file, size, size // 2).partition(b"\n")[2]
                os.ftruncate(file, 0)
                data = kept + data
            os.pwrite(file, data, os.lseek(file, 0, os.SEEK_END))
        finally:
            os.close(file)
    except OSError:
        return


def _line(text: str) -> dict[str, Any]:
    more = {"kind": text.kind, "who": text.who} if isinstance(text, ProcessEvent) else {}
    return {"time": round(time.time(), 3), "text": text, **more}
