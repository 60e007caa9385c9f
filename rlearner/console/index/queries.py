"""Answers the console's questions about one run from its index."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlearner.console.index import (
    answers,
    database,
    evaluations,
    events,
    groups,
    search,
    series,
    timeline,
)
from rlearner.console.index.answers import (
    EvaluatedTask,
    EvaluationResult,
    Event,
    GroupView,
    Provenance,
    Series,
    Timeline,
    TrajectoryFilter,
    TrajectoryPage,
)


class RunQueries:
    """Reader of one run's index; methods may run in any thread, and block for milliseconds.

    While the index is built the answers are those of the part that was read so far.

    Args:
        folder: of the run.
        path: of the database, by default ``database.place(folder)``.
        damaged: called when an answer finds the database damaged.

    Raises:
        DatabaseUnavailableError: from every method, if there is no database yet.
        DatabaseDamagedError: from every method, if it is damaged; the follower rebuilds it.
    """

    def __init__(
        self, folder: Path, path: Path | None = None, damaged: Callable[[], None] = lambda: None
    ) -> None:
        self.folder = folder
        self.path = path or database.place(folder)
        self._damaged = damaged
        self._local = threading.local()

    # -- steps

    def metric_names(self, search: str = "", limit: int = 500) -> list[str]:
        """Return the names of metrics that hold every word of ``search``, sorted."""
        with self._asking():
            return series.metric_names(self._connection(), search, limit)

    def last_values(self, names: Sequence[str] = ()) -> dict[str, float]:
        """Return the newest value of each of these metrics, or of all."""
        with self._asking():
            return series.last_values(self._connection(), names)

    def newest_rows(self, count: int) -> list[dict[str, float]]:
        """Return the metrics of the newest steps by name, oldest first."""
        with self._asking():
            return series.newest_rows(self._connection(), count)

    def series(
        self,
        names: Sequence[str],
        max_points: int = 1000,
        first_step: int = 0,
        last_step: int | None = None,
    ) -> dict[str, Series]:
        """Return metrics by name, without unknown ones.

        Args:
            max_points: of each; with more, the lowest and the highest value of each of half as many
                ranges of steps, and the mean of each range.
        """
        with self._asking():
            return series.series(self._connection(), names, max_points, first_step, last_step)

    def events(
        self,
        start: float | None = None,
        end: float | None = None,
        kinds: Sequence[str] = (),
        newest: int = 1000,
    ) -> list[Event]:
        """Return the ``newest`` events of a range of time, those of unknown time first."""
        with self._asking():
            return events.events(
                self._connection(), self.folder, start, end, kinds=kinds, newest=newest
            )

    def time_of(self, step: int) -> float | None:
        """Return when the line of a step was written, None if there is none."""
        with self._asking():
            return series.time_of(self._connection(), step)

    # -- timeline

    def extent(self) -> tuple[float, float]:
        """Return the time of the first and the last span; both 0 without any."""
        with self._asking():
            return timeline.extent(self._connection())

    def spans(
        self, start: float, end: float, resolution_s: float = 0.0, max_spans: int = 2000
    ) -> Timeline:
        """Return what processes did in a range of time, in at most ``max_spans`` spans.

        Args:
            resolution_s: length below which spans need not be told apart.
        """
        with self._asking():
            return timeline.spans(self._connection(), start, end, resolution_s, max_spans)

    # -- trajectories

    def domains(self) -> list[str]:
        """Return the domains of the trajectories, sorted."""
        with self._asking():
            return search.domains(self._connection())

    def search(
        self,
        criteria: TrajectoryFilter = TrajectoryFilter(),  # noqa: B008 - frozen
        order: answers.Order = "newest",
        limit: int = 50,
        after: str = "",
        *,
        count: bool = False,
    ) -> TrajectoryPage:
        """Return a page of trajectories.

        Args:
            after: of the previous page, with the same filter and order.
            count: whether to count all matches.

        Raises:
            ConfigError: if ``after`` or ``order`` is none of these.
        """
        with self._asking():
            return search.search(self._connection(), criteria, order, limit, after, count=count)

    def group(self, ticket: int) -> GroupView:
        """Return one group with all its episodes, token by token; slower the first time.

        Raises:
            UserError: if there is no such ticket, or its record is not in the archive.
        """
        with self._asking():
            return groups.group(self._connection(), self.folder, ticket)

    def provenance(self, ticket: int) -> Provenance:
        """Return the way of a ticket, as ``rlearner trace`` shows it.

        Raises:
            UserError: if there is no such ticket.
        """
        with self._asking():
            return groups.provenance(self._connection(), self.folder, ticket)[0]

    # -- evaluations

    def evaluations(self) -> list[EvaluationResult]:
        """Return all evaluations whose episodes are in the run's folder, by step and policy."""
        with self._asking():
            return evaluations.evaluations(self._connection())

    def evaluated_tasks(self, step: int, policy: str = "actor") -> list[EvaluatedTask]:
        """Return the tasks of an evaluation, in the order of its file."""
        with self._asking():
            return evaluations.evaluated_tasks(self._connection(), step, policy)

    def evaluated_task(self, step: int, policy: str, number: int) -> dict[str, Any]:
        """Return one task's row of the folder ``evals``: prompt, text, response, frames …; empty if
        it is not there.
        """
        with self._asking():
            return evaluations.evaluated_task(self._connection(), self.folder, step, policy, number)

    # -- the database

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            with database.explained():
                yield
        except database.DatabaseDamagedError:
            self.close()
            self._damaged()
            raise

    def close(self) -> None:
        if (opened := getattr(self._local, "held", None)) is not None:
            opened[1].close()
            self._local.held = None

    def _connection(self) -> sqlite3.Connection:
        """Return this thread's connection; a rebuilt database is another file."""
        inode = database.identity(self.path)
        opened: tuple[int, sqlite3.Connection] | None = getattr(self._local, "held", None)
        if opened is not None and opened[0] == inode:
            return opened[1]
        self.close()
        connection = database.open_reader(self.path)
        self._local.held = inode, connection
        return connection
