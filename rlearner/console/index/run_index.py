"""The index of one run's folder: brings its database up to date, a bounded piece of work at a time.

Everything that one round reads is committed with the places it was read up to, so that a process
that is killed at any moment, or a second console on the same run, neither loses nor repeats
anything. It writes no other file than its own.
"""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from pathlib import Path

from learner.credit.archive import FOLDER as SAMPLES_FOLDER
from learner.credit.archive_trim import read_trim
from rlearner.console.index import artifacts, database, records, tickets
from rlearner.console.index.live_spans import LiveSpans
from rlearner.console.index.steps import StepsReader


class RunIndex:
    """Writer of the database of one run.

    Args:
        folder: of the run.
        path: of the database, by default ``database.place(folder)``.
        live: what processes reported, to be written too.

    Raises:
        DatabaseDamagedError: if the database cannot be used; call ``database.move_aside``, then try
            again.
        DatabaseUnavailableError: if it cannot be written.
    """

    def __init__(
        self, folder: Path, path: Path | None = None, live: LiveSpans | None = None
    ) -> None:
        self.folder = folder
        self.path = path or database.place(folder)
        self.inode = database.identity(self.path)
        self.connection = database.open_writer(self.path)
        self.inode = database.identity(self.path)
        self._steps = StepsReader()
        self._live = live

    def check(self) -> None:
        """Look for damage in the whole file; takes about a second per 200 MB.

        Raises:
            DatabaseDamagedError: if there is some.
        """
        with database.explained():
            (verdict,) = self.connection.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise database.DatabaseDamagedError(" ".join(str(verdict).split()))

    def update(self, *, only_steps: bool = False) -> bool:
        """Read a piece of what is new, in one transaction; return whether there may be more.

        The last ``RESERVE_BYTES`` of a disk are left to the run.

        Args:
            only_steps: leave the records and all the rest for later.

        Raises:
            DatabaseDamagedError: if the database is damaged.
            DatabaseUnavailableError: if it cannot be written now; nothing has changed.
        """
        database.require_room(self.path)
        with database.explained():
            try:
                self.connection.execute("BEGIN IMMEDIATE")
                more = self._steps.update(self.connection, self.folder)
                is_live = not only_steps and self._live is not None and self._live.is_due
                if not only_steps:
                    more = self._update() or more
                if self._live is not None and is_live:
                    self._live.flush(self.connection)
                self.connection.execute("COMMIT")
            except BaseException:
                self._steps.forget_names()
                with suppress(sqlite3.Error):
                    self.connection.execute("ROLLBACK")
                raise
        if self._live is not None and is_live:
            self._live.flushed()
        return more

    def _update(self) -> bool:
        has_lines, judged = tickets.update(self.connection, self.folder)
        has_records, arrived = records.update(self.connection, self.folder)
        tickets.judge(self.connection, (judged | arrived) - {0})
        artifacts.update(self.connection, self.folder)
        return has_lines or has_records

    def notes(self) -> list[str]:
        """Return one line for each source that is missing or cannot be read."""
        with database.explained():
            columns = [
                row[0]
                for row in self.connection.execute(
                    "SELECT problem FROM sources WHERE problem != '' ORDER BY id"
                )
            ]
            has_frames = self.connection.execute("SELECT 1 FROM frames LIMIT 1").fetchone()
        if has_frames is None and not (self.folder / SAMPLES_FOLDER).is_dir():
            columns.append(
                "no trajectories: the run does not keep its records (samples.keep=true keeps them)"
            )
        if (trim := read_trim(self.folder / SAMPLES_FOLDER)).before:
            columns.append(f"trajectories of older groups are no longer there: {trim}")
        return columns

    def version(self) -> tuple[int, int]:
        """Return what differs after each change of the database, by this process or another one."""
        with database.explained():
            (data_version,) = self.connection.execute("PRAGMA data_version").fetchone()
        return self.connection.total_changes, int(data_version)

    def counts(self) -> tuple[float, int, int]:
        """Return the share of bytes that was read, the newest step, the number of trajectories."""
        with database.explained():
            read, size = self.connection.execute(
                "SELECT total(offset), total(size) FROM sources WHERE kind IN ('steps', "
                "'ledger', 'frames')"
            ).fetchone()
            step = self.connection.execute("SELECT max(step) FROM steps").fetchone()[0]
            count = self.connection.execute(
                "SELECT value FROM meta WHERE name = 'trajectories'"
            ).fetchone()[0]
        return (min(1.0, read / size) if size else 1.0), max(step or 0, 0), int(count)

    def close(self) -> None:
        """Close the database; its write-ahead log is folded into it."""
        with suppress(sqlite3.Error):
            self.connection.close()
