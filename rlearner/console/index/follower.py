"""Keeps a run's index up to date in a thread, rebuilds a damaged one, waits on a full disk."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

from broker.errors import UserError
from rlearner.console.index import database
from rlearner.console.index.answers import IndexStatus
from rlearner.console.index.database import DatabaseDamagedError, DatabaseUnavailableError
from rlearner.console.index.live_spans import LiveSpans
from rlearner.console.index.queries import RunQueries
from rlearner.console.index.run_index import RunIndex

log = logging.getLogger(__name__)

POLL_S: Final = 1.25  # between looks at metrics.jsonl
LOOKS: Final = 3  # of which the last one looks at all files: larger transactions take less time
RETRY_S: Final = 5.0  # while the database cannot be written
# read in about a second at a start; damage of a larger one is found by its use
CHECK_BYTES: Final = 2**28
PAUSE_S: Final = 0.002  # after each round of a long build, for the threads that answer


class RunFollower:
    """Follower of one run's folder.

    Args:
        folder: of the run.
        changed: called in the follower's thread after new rows were committed.
        path: of the database, by default ``database.place(folder)``.

    Attributes:
        queries: the answers.
        live: takes what processes report.
    """

    def __init__(
        self, folder: Path, changed: Callable[[], None] = lambda: None, path: Path | None = None
    ) -> None:
        self.folder = folder
        self.path = path or database.place(folder)
        # An answer found damage.
        self._suspect = threading.Event()
        self.queries = RunQueries(folder, self.path, self._suspect.set)
        self.live = LiveSpans()
        self._changed = changed
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"index of {folder.name}", daemon=True
        )
        self._state: Literal["current", "building", "rebuilding", "waiting", "gone"] = "building"
        self._problem = ""
        self._notes: tuple[str, ...] = ()
        self._counts = (0.0, 0, 0)
        self._inode = 0

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop after the round in progress."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def status(self) -> IndexStatus:
        """Return whether the answers are complete; from any thread, without a wait."""
        return IndexStatus(self._state, self._problem, self._notes, *self._counts, str(self.path))

    # -- the thread

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._follow()
            except DatabaseUnavailableError as error:
                self._wait(
                    f"the console's index cannot be written ({error}); the run is not affected"
                )
            except DatabaseDamagedError as error:
                self._say(f"the console's index was damaged ({error}); it is built again")
                self._state = "rebuilding"
                self._set_aside()
            except UserError as error:
                self._wait(str(error))
            except Exception as error:
                # The pages stay, with what was indexed so far.
                log.exception("index of %s", self.folder)
                self._wait(f"the console's index failed: {type(error).__name__}: {error}")

    def _follow(self) -> None:
        """Follow until stopped or until something fails."""
        self._inode = database.identity(self.path)
        index = RunIndex(self.folder, self.path, self.live)
        try:
            self._inode = index.inode
            if self.path.stat().st_size <= CHECK_BYTES:
                index.check()
            version = (-1, -1)
            looks = 0
            while not self._stop.is_set():
                if not (self.folder / "config.yaml").exists():
                    self._state = "gone"
                    self._problem = f"{self.folder} is no longer there"
                    self._stop.wait(POLL_S)
                    continue
                if database.identity(self.path) != index.inode:
                    # Deleted, or set aside by another console.
                    return
                if self._suspect.is_set():
                    raise DatabaseDamagedError("an answer could not be read")
                more = index.update(only_steps=looks % LOOKS > 0)
                old_version = version
                version = index.version()
                looks = 0 if more else looks + 1
                if version != old_version or self._state != "current":
                    self._notes = tuple(index.notes())
                    self._counts = index.counts()
                self._note(more=more)
                if version != old_version:
                    self._changed()
                self._stop.wait(PAUSE_S if more else POLL_S)
        finally:
            index.close()

    def _note(self, *, more: bool) -> None:
        if not more:
            self._state = "current"
            self._problem = ""
        elif self._state not in ("building", "rebuilding"):
            self._state = "building"
            self._problem = ""

    def _set_aside(self) -> None:
        try:
            database.move_aside(self.path, self._inode)
            self._suspect.clear()
        except (DatabaseUnavailableError, UserError) as error:
            self._wait(f"the console's damaged index cannot be moved aside ({error})")

    def _wait(self, problem: str) -> None:
        self._state = "waiting"
        self._say(problem)
        self._stop.wait(RETRY_S)

    def _say(self, problem: str) -> None:
        if problem != self._problem:
            log.warning("%s: %s", self.folder.name, problem)
        self._problem = problem
