"""The runs that the console shows, each with its index and broker while a page is open."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from broker.errors import UserError
from broker.settings.run_settings import stored_value
from learner.run_folder import RunPlace, find_run
from rlearner.console.chart_view import ChartView
from rlearner.console.index.follower import RunFollower
from rlearner.console.index.runs import RunList
from rlearner.console.live import LiveRun
from rlearner.ops.run_kinds import RunKind, run_kind

log = logging.getLogger(__name__)

T = TypeVar("T")

NAME_BYTES: Final = 255  # of a folder
# Without a page, after which a run's index is no longer followed.
IDLE_S: Final = 120.0
SETTLE_S: Final = 2.0  # for which a page waits for the index
BUILDING: Final = ("building", "rebuilding")
MAX_ANSWERS: Final = 32  # that are remembered of a run


class ConsoleRun:
    """One run: its folder, its index and its broker.

    Args:
        is_kept: whether its index is followed without a page, too.
    """

    def __init__(self, place: RunPlace, named_broker: str | None, *, is_kept: bool) -> None:
        self.name = place.folder.name
        self.folder = place.folder
        self.config = place.config
        self.is_kept = is_kept
        self._loop = asyncio.get_running_loop()
        self._listeners: set[Callable[[], None]] = set()
        self._answers: dict[str, Any] = {}
        self.follower = RunFollower(self.folder, self._changed)
        self.queries = self.follower.queries
        self.follower.start()
        self.live = LiveRun(
            place.name,
            place.folder,
            named_broker,
            self.follower.live,
            has_broker=self.kind == "training",
        )
        if is_kept:
            self.live.keep()
        self.used_at = self._loop.time()

    @property
    def kind(self) -> RunKind:
        """What the folder holds."""
        return run_kind(self)

    async def settle(self) -> None:
        """Wait a moment until the index has read the folder, so that a page begins complete."""
        deadline = self._loop.time() + SETTLE_S
        while True:
            is_building = self.follower.status().state in BUILDING
            if not is_building or self._loop.time() > deadline:
                return
            await asyncio.sleep(0.02)

    @property
    def steps(self) -> int:
        """Steps that the run is to make, 0 if unknown."""
        return int(stored_value(self.config, "train", "steps") or 0)

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` when the index has new rows; return what ends that."""
        self._listeners.add(listener)

        def end() -> None:
            self._listeners.discard(listener)
            self.used_at = self._loop.time()

        return end

    def remember(self, key: str, question: Callable[[], T]) -> Callable[[], T]:
        """Return a question that is answered again only when the index has new rows."""

        def answer() -> T:
            # When rows come, others are begun.
            answers = self._answers
            if key not in answers:
                if len(answers) >= MAX_ANSWERS:
                    answers.clear()
                answers[key] = value = question()
                return value
            return cast(T, answers[key])

        return answer

    @property
    def is_idle(self) -> bool:
        """Whether no page needs it any more."""
        return (
            not self.is_kept and not self._listeners and self._loop.time() - self.used_at > IDLE_S
        )

    async def close(self) -> None:
        await asyncio.to_thread(self.follower.close)
        await self.live.close()

    def _changed(self) -> None:
        """Called in the follower's thread."""
        self._answers = {}
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        for listener in list(self._listeners):
            try:
                listener()
            except Exception:
                # A page that is gone must not end the others.
                log.exception("page of run %s", self.name)


@dataclass
class ConsoleState:
    """Everything that pages share.

    Attributes:
        root: folder of the runs.
        broker: address that the operator named, None: each run's own.
        actions: whether operator's actions are allowed.
    """

    root: Path
    broker: str | None = None
    actions: bool = False

    def __post_init__(self) -> None:
        self._runs: dict[str, ConsoleRun] = {}
        self.list = RunList(self.root)
        self.chart_view = ChartView()

    def run(self, name: str, *, keep: bool = False) -> ConsoleRun:
        """Return a run by the name of its folder, opening it if it is not open.

        Raises:
            UserError: if there is none, or its settings cannot be read.
        """
        run = self._runs.get(name)
        if run is None or not (run.folder / "config.yaml").exists():
            if (
                "/" in name
                or name.startswith(".")
                or not name.isprintable()
                or len(os.fsencode(name)) > NAME_BYTES
            ):
                raise UserError(f"no run {name[:60]!r} below {self.root}")
            place = find_run(name, str(self.root)) if run is None else None
            if place is None or place.folder.parent != self.root.absolute():
                if run is not None:
                    # Its pages say that the folder is gone.
                    return run
                raise UserError(f"no run {name!r} below {self.root}")
            run = self._runs[name] = ConsoleRun(place, self.broker, is_kept=keep)
        run.used_at = asyncio.get_running_loop().time()
        return run

    async def tidy(self) -> None:
        """Close runs that no page needs, until cancelled."""
        while True:
            await asyncio.sleep(10.0)
            for name in [name for name, run in self._runs.items() if run.is_idle]:
                await self._runs.pop(name).close()

    async def close(self) -> None:
        await asyncio.gather(self.list.close(), *(run.close() for run in self._runs.values()))
