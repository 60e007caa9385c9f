"""What the broker says about a run: processes, queues, desired state; read for open pages."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from broker.contract import wire
from broker.contract.streams import (
    CONTROL,
    DEAD,
    EPISODES,
    EVALTICKETS,
    ROLES,
    SAMPLES,
    TICKETS,
    Stream,
)
from broker.errors import BrokerUnreachable, RlearnerError, UserError
from broker.jetstream.bus import Bus
from broker.jetstream.core_messages import watch_metrics
from broker.nats.nats_errors import ApiError, Disconnected, NoStream
from broker.runtime.presence import SILENT_AFTER_S, Roster
from broker.settings.run_address import broker_address
from broker.settings.runspec import find_runs
from rlearner.console.index.live_spans import LiveSpans

log = logging.getLogger(__name__)

LOOK_S: Final = 2.0  # between looks at queues and the desired state
TELL_S: Final = 1.0  # between two calls of the listeners
LINGER_S: Final = 15.0  # after the last page: reloading one does not connect again
RETRY_S: Final = 15.0
CONNECT_S: Final = 2.0
QUEUES: Final = (TICKETS, EPISODES, SAMPLES, EVALTICKETS, DEAD)


@dataclass
class BrokerView:
    """State of a run on its broker.

    Attributes:
        problem: why nothing is known, one line; empty while connected.
        desired: state that the operator wants, and why (``reason``).
        processes: those alive, by role and id.
        metrics: newest of each process, by ``role.id``.
        queues: messages waiting, by stream and key; looked at while a page shows them.
    """

    problem: str = "connecting to the run's broker"
    broker: str = ""
    desired: str = ""
    reason: str = ""
    processes: list[wire.Presence] = field(default_factory=list)
    metrics: dict[str, wire.Metrics] = field(default_factory=dict)
    queues: dict[str, dict[str, int]] = field(default_factory=dict)


class LiveRun:
    """Reader of one run's broker, connected while somebody listens.

    Args:
        broker_url: the broker's address, if the operator named one.
        spans: receives the metrics of every process.
        has_broker: whether the run has one, unlike training from data.
    """

    def __init__(
        self,
        run: str,
        folder: Path,
        broker_url: str | None,
        spans: LiveSpans,
        *,
        has_broker: bool = True,
    ) -> None:
        self.run = run
        self.folder = folder
        self._broker_url = broker_url
        self._has_broker = has_broker
        self._spans = spans
        self._is_kept = False
        self._looked_at = -LOOK_S
        self.view = BrokerView()
        self._url = ""  # of the broker that was tried last
        self.bus: Bus | None = None  # while connected
        # Whether each one shows queues.
        self._listeners: dict[Callable[[], None], bool] = {}
        self._heard: dict[str, float] = {}  # when, by ``role.id``
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        # Connected, or known why not.
        self._settled = asyncio.Event()

    def listen(self, listener: Callable[[], None], *, queues: bool = False) -> Callable[[], None]:
        """Call ``listener`` after changes, at most once a second; return what ends that.

        Args:
            queues: whether it shows the queues, which are looked at only then.
        """
        self._listeners[listener] = queues
        if queues:
            self._looked_at = -LOOK_S
        if self._task is None or self._task.done():
            self._settled.clear()
            self._task = asyncio.create_task(self._serve())

        def end() -> None:
            self._listeners.pop(listener, None)

        return end

    def keep(self) -> None:
        """Stay connected without a page, so that the timeline has no gaps."""
        self._is_kept = True
        self.listen(lambda: None)()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def connected(self) -> Bus:
        """Return a connection to the run's broker, which is kept while pages are open.

        Raises:
            UserError: if there is none.
        """
        # Connects, and stays so for a while.
        self.listen(lambda: None)()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2 * CONNECT_S + 1):
                await self._settled.wait()
        if self.bus is None:
            raise UserError(self.view.problem or "the run's broker does not answer")
        return self.bus

    async def _serve(self) -> None:
        left_at: float | None = None
        clock = asyncio.get_running_loop().time
        while self._is_kept or left_at is None or clock() - left_at < LINGER_S:
            try:
                await self._follow()
                if not self._listeners:
                    return
                # A page came while the connection was closed.
                left_at = None
                continue
            except (RlearnerError, ApiError, Disconnected, OSError) as error:
                self._say(" ".join(str(error).split()))
            # pages would show the last state as if it were the present one
            except Exception as error:
                log.exception("following run %s", self.run)
                self._say(f"{type(error).__name__}: {' '.join(str(error).split())}")
            await asyncio.sleep(TELL_S if await self._has_moved() else RETRY_S)
            left_at = None if self._listeners else left_at or clock()

    def _say(self, problem: str) -> None:
        self.bus = None
        self.view = BrokerView(problem=problem)
        self._settled.set()
        self._tell()

    async def _follow(self) -> None:
        """Follow the run until no page listens.

        Raises:
            UserError: if its broker does not answer or does not know it.
        """
        self._url = await self._address()
        if not self._url:
            raise UserError("no live data: this run has no broker")
        try:
            bus = await Bus.connect(
                self._url, self.run, name=f"console-{os.getpid()}", deadline_s=CONNECT_S
            )
        except BrokerUnreachable as error:
            raise UserError(f"no live data: {error}") from None
        roster = Roster(bus)
        tasks: list[asyncio.Task[None]] = []
        try:
            if self.run not in await find_runs(bus):
                raise UserError(
                    f"no live data: the broker at {bus.link.where} does not know run {self.run}"
                )
            await roster.start()
            self.bus = bus
            self.view = BrokerView(problem="", broker=bus.link.where)
            self._heard.clear()
            self._settled.set()
            tasks = [asyncio.create_task(self._hear(bus))]
            await self._look_while_heard(bus, roster, tasks[0])
        finally:
            self.bus = None
            self._spans.listening(False)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await roster.close()
            await bus.close()

    async def _address(self) -> str:
        if not self._has_broker:
            return ""
        return await asyncio.to_thread(broker_address, self._broker_url, self.folder)

    async def _has_moved(self) -> bool:
        """Return whether the run has another broker than the one that was tried last."""
        try:
            return await self._address() != self._url
        except (RlearnerError, OSError, ValueError):
            # The next attempt to connect says why.
            return False

    async def _look_while_heard(
        self, bus: Bus, roster: Roster, hearing: asyncio.Task[None]
    ) -> None:
        """Keep the view up to date until no page listens.

        Raises:
            UserError: if the broker is gone and the run has another one, as after a resume.
        """
        clock = asyncio.get_running_loop().time
        self._looked_at = -LOOK_S
        left_at = clock()
        while True:
            now = clock()
            if self._listeners:
                left_at = now
            elif now - left_at > LINGER_S and not self._is_kept:
                return
            if hearing.done():
                hearing.result()
            is_connected = bus.link.connected.is_set()
            self._spans.listening(is_connected)
            old_problem = self.view.problem
            if not is_connected:
                if await self._has_moved():
                    raise UserError("no live data: the run has another broker now")
                self.view.problem = f"the broker at {self.view.broker} does not answer now"
            elif now - self._looked_at >= LOOK_S and self._listeners:
                self._looked_at = now
                await self._look(bus)
                self.view.problem = ""
            present = [presence for role in ROLES for presence in roster.alive(role)]
            if present != self.view.processes or self.view.problem != old_problem:
                self.view.processes = present
                self._changed.set()
            if is_connected:
                self._forget_silent({f"{presence.role}.{presence.id}" for presence in present}, now)
            if self._changed.is_set():
                self._changed.clear()
                self._tell()
            await asyncio.sleep(TELL_S)

    async def _look(self, bus: Bus) -> None:
        """Read what is not announced."""
        view = self.view
        desired = await bus.key_value(CONTROL).get(self.run)
        if desired is not None and isinstance(desired[0], wire.DesiredState):
            view.desired = desired[0].state
            view.reason = desired[0].reason
        if any(self._listeners.values()):
            for stream in QUEUES:
                view.queues[stream.name] = await _stream_depth(bus, stream)
        self._changed.set()

    async def _hear(self, bus: Bus) -> None:
        clock = asyncio.get_running_loop().time
        async for metrics in watch_metrics(bus):
            key = f"{metrics.role}.{metrics.id}"
            self._spans.add(metrics)
            self.view.metrics[key] = metrics
            self._heard[key] = clock()
            self._changed.set()

    def _forget_silent(self, present: set[str], now: float) -> None:
        """Forget the metrics of processes that are gone, so that pages do not show them."""
        for key in [
            key
            for key in self.view.metrics
            if key not in present and now - self._heard[key] > SILENT_AFTER_S
        ]:
            del self.view.metrics[key], self._heard[key]
            self._changed.set()

    def _tell(self) -> None:
        for listener in list(self._listeners):
            try:
                listener()
            except Exception:
                # A page that is gone must not end the others.
                log.exception("page of run %s", self.run)


async def _stream_depth(bus: Bus, stream: Stream) -> dict[str, int]:
    try:
        return await bus.depth(stream)
    except (ApiError, NoStream):
        return {}
