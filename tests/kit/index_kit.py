"""Run folders that change under the console's index, and what an index holds, apart from its own
numbering.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlearner.console.index.run_index import RunIndex

TABLES = {
    "steps": "SELECT end, start, crc, step, time, wall, train, offer FROM steps ORDER BY end",
    "points": "SELECT m.name, p.step, p.value FROM points p JOIN metrics m ON m.id = p.metric ORDER BY 1, 2",
    "ledger": "SELECT s.name, l.end, l.crc, l.first, l.ticket, l.state, l.seq, l.step, l.body"
    " FROM ledger_lines l JOIN sources s ON s.id = l.source ORDER BY 1, 2",
    "tickets": "SELECT * FROM tickets ORDER BY ticket",
    "frames": "SELECT s.name, f.offset, f.seq, f.ticket, f.length, f.digest, f.kind, f.epoch"
    " FROM frames f JOIN sources s ON s.id = f.source ORDER BY 1, 2",
    "groups": "SELECT s.name, g.offset, g.seq, g.ticket, g.hub, g.prompt, count(p.rowid)"
    " FROM groups g JOIN sources s ON s.id = g.source"
    " LEFT JOIN (SELECT rowid FROM prompt_texts WHERE prompt_texts MATCH 'task') p ON p.rowid = g.id"
    " GROUP BY g.id ORDER BY 1, 2",
    "trajectories": "SELECT s.name, g.offset, t.seq, t.ordinal, t.ticket, t.episode, t.domain, t.task_index, t.step,"
    " t.state, t.reward, t.success, t.ended, t.tokens, t.sampled, t.turns, t.oldest, t.newest, t.servers, t.greedy,"
    " t.preview, count(r.rowid) FROM trajectories t JOIN groups g ON g.id = t.grp JOIN sources s ON s.id = g.source"
    " LEFT JOIN (SELECT rowid FROM response_texts WHERE response_texts MATCH 'left') r ON r.rowid = t.id"
    " GROUP BY t.id ORDER BY 1, 2, 4",
    "evaluated": "SELECT s.name, e.number, e.start, e.end, e.step, e.policy, e.domain, e.task_index, e.episodes,"
    " e.successes, e.reward_sum, e.frames, e.prompt FROM evaluated e JOIN sources s ON s.id = e.source ORDER BY 1, 2",
    "events": "SELECT s.name, e.key, e.time, e.step, e.kind, e.text FROM events e JOIN sources s ON s.id = e.source"
    " ORDER BY 1, 2",
    "sources": "SELECT kind, name, first, offset, problem FROM sources ORDER BY 1, 2",
}


def finish(index: RunIndex) -> None:
    """Update until there is nothing more to read."""
    while index.update():
        pass


def contents(index: RunIndex) -> dict[str, list[Any]]:
    """Return all that an index holds about files, by table."""
    return {name: index.connection.execute(query).fetchall() for name, query in TABLES.items()}


def rebuilt(folder: Path, path: Path) -> dict[str, list[Any]]:
    """Return what an index of the folder holds that begins from nothing."""
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    index = RunIndex(folder, path)
    finish(index)
    found = contents(index)
    index.close()
    return found


class Files:
    """Files of a run that are written, cut and damaged, each time with a later time of change."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._time = 2 * 10**18

    def all(self) -> list[Path]:
        kinds = ("metrics.jsonl", "ledger/*.jsonl", "samples/*.frames", "evals/*.jsonl")
        return sorted(path for kind in kinds for path in self.folder.glob(kind))

    def touched(self, path: Path) -> None:
        self._time += 10**9
        os.utime(path, ns=(self._time, self._time))

    def edit(self, path: Path, change: Callable[[bytearray], None]) -> None:
        """Change a file in place."""
        data = bytearray(path.read_bytes())
        change(data)
        with path.open("r+b") as file:
            file.write(data)
            file.truncate()
        self.touched(path)

    def replace(self, path: Path, data: bytes) -> None:
        """Put another file under the name."""
        path.parent.mkdir(exist_ok=True)
        new = path.with_name(f".{path.name}.new")
        new.write_bytes(data)
        os.replace(new, path)
        self.touched(path)

    def copy_from(self, other: Path) -> None:
        """Make the files those of another folder."""
        for path in self.all():
            if not (other / path.relative_to(self.folder)).exists():
                path.unlink()
        shutil.copytree(other, self.folder, dirs_exist_ok=True)
        for path in self.all():
            self.touched(path)
