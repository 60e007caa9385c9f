"""A process that joined a run, and how it is asked to end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from broker.contract import wire
from broker.errors import described
from broker.jetstream.bus import Bus
from broker.jetstream.core_messages import publish_metrics
from broker.runtime.announce import Announcer
from broker.runtime.figures import ProcessFigures
from broker.runtime.health import Health, Report, report_of
from broker.runtime.spans import SpanRecorder
from broker.settings.run_settings import RunSettings
from broker.system.recent_warning import RecentWarning
from broker.telemetry.traces import open_traces

log = logging.getLogger(__name__)

REPORT_EVERY_S: Final = 1.0


class Stop:
    """A request to end, by a signal, the operator's desired state, or the process itself.

    The first one asks for a drain; a second signal exits at once with 130.

    Attributes:
        at_once: called in the signal handler before that exit.
        health: of this process.
        figures: of this process.
        close_metrics: stops serving its figures; None while they are not served.
    """

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.reason = ""
        self.health = Health()
        self.figures = ProcessFigures()
        self.close_metrics: Callable[[], None] | None = None
        self.at_once: list[Callable[[], None]] = []

    def request(self, reason: str) -> None:
        """Request a drain; only the first reason counts."""
        if not self.asked.is_set():
            self.reason = reason
            self.asked.set()
            log.info("stopping: %s", reason)
            self.health.drain(reason)


@dataclass
class Member:
    """A process that joined a run.

    Attributes:
        spec: the newest RunSpec; replaced when the learner resumes under a new epoch.
        renewed: set when it was replaced; cleared by the code that waits for it.
        running: cleared while the operator wants a pause; ``await member.running.wait()`` before
            taking new work.
        pausing: set while the operator wants a pause.
        desired: what the operator wants: running, paused, draining or stopped.
        spans: what the process does, for the timeline; reported with the metrics.
        logger: whose warnings are announced.
    """

    bus: Bus
    spec: wire.RunSpec
    id: str
    role: str
    stop: Stop
    running: asyncio.Event = field(default_factory=asyncio.Event)
    pausing: asyncio.Event = field(default_factory=asyncio.Event)
    renewed: asyncio.Event = field(default_factory=asyncio.Event)
    desired: str = "running"
    spans: SpanRecorder = field(default_factory=SpanRecorder)
    logger: logging.Logger = field(default_factory=logging.getLogger)
    _announcer: Announcer | None = None
    _describe: Callable[[], wire.Presence] = field(init=False)
    _reporting: asyncio.Task[None] | None = None
    _text: Callable[[], dict[str, str]] = dict
    _warning: RecentWarning = field(default_factory=RecentWarning)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _settings: tuple[wire.RunSpec, RunSettings] | None = None
    _failure: BaseException | None = None

    def __post_init__(self) -> None:
        self.stop.figures.bus = self.bus
        every = self.settings.telemetry.traces
        self.spans.traces = open_traces(every, self.bus.run, self.role, self.id)
        self.follow(self.desired, "")

    @property
    def settings(self) -> RunSettings:
        """The run's settings in the newest RunSpec."""
        if self._settings is None or self._settings[0] is not self.spec:
            self._settings = (self.spec, RunSettings.of_config(self.spec.config))
        return self._settings[1]

    @property
    def paused(self) -> bool:
        """Whether the operator wants no new work to be taken."""
        return not self.running.is_set()

    def announce(self, describe: Callable[[], wire.Presence]) -> None:
        """Announce this process and its newest warning; a second call replaces the description."""
        self._describe = describe
        if self._announcer is None:
            self.logger.addHandler(self._warning)
            self._announcer = Announcer(
                self.bus,
                lambda: msgspec.structs.replace(
                    self._describe(), said=self._warning.line(time.time())
                ),
            )
            self.spawn(self._announcer.serve())
            self.stop.health.follow(self._health)
        else:
            self._announcer.poke()
            self.stop.health.refresh()

    def poke(self) -> None:
        """Announce now, because something has changed."""
        if self._announcer is not None:
            self._announcer.poke()
            self.stop.health.refresh()

    def report(
        self,
        values: Callable[[], dict[str, float]],
        text: Callable[[], dict[str, str]] | None = None,
    ) -> None:
        """Publish metrics every second; called again, replace their source."""
        if self._reporting is not None:
            self._reporting.cancel()
        self._text = text or dict
        self._reporting = self.spawn(self._keep_reporting(values, text))

    def renew(self, spec: wire.RunSpec) -> None:
        """Note that the learner resumed under a new epoch."""
        self.spec = spec
        self.renewed.set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine until the process leaves; if it fails, request a stop, and raise its
        error on leaving.
        """
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def follow(self, desired: str, reason: str) -> None:
        """Follow the operator's desired state.

        ``draining`` stops environment hubs, which start new work; the processes that serve them
        stay until ``stopped``.
        """
        self.desired = desired
        if desired == "paused":
            self.running.clear()
            self.pausing.set()
        else:
            self.pausing.clear()
            self.running.set()
        if desired == "stopped" or (desired == "draining" and self.role == "envhub"):
            self.stop.request(f"the run is {desired}" + (f": {reason}" if reason else ""))

    async def leave(self) -> None:
        """Stop the tasks and the announcements.

        Raises:
            Exception: the error of a task that failed.
        """
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.logger.removeHandler(self._warning)
        if self._announcer is not None:
            await self._announcer.close()
            self.stop.health.set("starting", f"left run {self.bus.run}")
        if self.spans.traces is not None:
            await asyncio.to_thread(self.spans.traces.close)
        if self._failure is not None:
            raise self._failure

    def _health(self) -> Report:
        return report_of(self.bus.run, self._describe(), self._text().get("phase", ""))

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            self.stop.request(described(error))

    async def _keep_reporting(
        self, values: Callable[[], dict[str, float]], text: Callable[[], dict[str, str]] | None
    ) -> None:
        while True:
            texts = text() if text else {}
            numbers = wire.Metrics(
                role=self.role,
                id=self.id,
                time=time.time(),
                values=values(),
                text=texts,
                spans=self.spans.take(),
            )
            self.stop.figures.report(numbers)
            await publish_metrics(self.bus, numbers)
            await asyncio.sleep(REPORT_EVERY_S)
