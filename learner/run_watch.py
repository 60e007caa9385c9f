"""Watches whether this learner still holds the run, and which state the operator requests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

import msgspec

from broker.contract import wire
from broker.contract.streams import CONTROL, RUNS
from broker.errors import Fenced
from broker.jetstream.bus import Bus
from broker.runtime.process import Stop, Stopped
from broker.settings.runspec import publish_runspec

log = logging.getLogger(__name__)

# The desired states in which a learner exits.
ENDINGS: Final = ("draining", "stopped")


class EpochWatch:
    """Takes the next epoch, then watches the run's epoch and desired state.

    Args:
        say: receives a text while the run is paused, and an empty one afterwards.
    """

    def __init__(self, bus: Bus, stop: Stop, say: Callable[[str], None]) -> None:
        self._bus = bus
        self._stop = stop
        self._say = say
        self._spec: wire.RunSpec | None = None  # as published
        self.epoch = 0  # of this incarnation, 0 before it has taken one
        self.paused = False  # by the operator
        self._fence: Fenced | None = None
        self._start_revision = 0  # revision of the desired state when this learner began

    async def open(self) -> None:
        """Read the desired state: a start overrides it, but not a later one."""
        _, self._start_revision = await self._read_control()

    async def take_epoch(
        self, spec: wire.RunSpec, *, above: int = 0, cleared_epoch: int | None = None
    ) -> None:
        """Fence the previous holder of the run and let the other processes join.

        Args:
            above: newest epoch noted in the run's folder; the broker may have lost it.
            cleared_epoch: newest epoch whose holder has ended; None takes over from any.

        Raises:
            Fenced: if another learner took an epoch above ``cleared_epoch``.
            Stopped: if a stop was requested; the run stays with its holder.
        """
        state, revision = await self._read_control()
        if revision != self._start_revision and state in ENDINGS:
            self._stop.request(f"the run is {state}")
        if self._stop.asked.is_set():
            raise Stopped(self._stop.reason)
        self.epoch = await publish_runspec(self._bus, spec, above=above, known_epoch=cleared_epoch)
        self._spec = msgspec.structs.replace(spec, epoch=self.epoch)
        if revision == self._start_revision and state == "paused":
            run = self._bus.run
            log.warning(
                "run %s is paused and stays so; continue it with `rlearner resume %s`", run, run
            )
        elif revision == self._start_revision:
            control = self._bus.key_value(CONTROL)
            running = wire.DesiredState(state="running")
            if revision:
                await control.update(self._bus.run, running, revision)
            else:
                await control.create(self._bus.run, running)
        log.info("epoch %d of run %s", self.epoch, self._bus.run)

    def services(self) -> list[Coroutine[Any, Any, None]]:
        """Return the coroutines that watch both, each until cancelled."""
        return [self._follow_epoch(), self._follow_control()]

    async def put(self, desired: wire.DesiredState) -> None:
        """Publish the desired state of the run."""
        await self._bus.key_value(CONTROL).put(self._bus.run, desired)

    async def desired(self) -> str:
        """Return the desired state of the run, empty if the broker has none."""
        return (await self._read_control())[0]

    async def _read_control(self) -> tuple[str, int]:
        """Return the desired state and its revision; empty and 0 if there is none."""
        entry = await self._bus.key_value(CONTROL).get(self._bus.run)
        if entry is None or not isinstance(entry[0], wire.DesiredState):
            return "", 0
        return entry[0].state, entry[1]

    async def refuse_if_fenced(self) -> None:
        """Ask the broker whether this learner still holds the run.

        Raises:
            Fenced: if a newer one does.
        """
        entry = await self._bus.key_value(RUNS).get(self._bus.run)
        if entry is not None and isinstance(entry[0], wire.RunSpec):
            self._check(entry[0].epoch)

    def refuse_if_seen_fenced(self) -> None:
        """Check the same without the broker, by the watched epoch and earlier checks.

        Raises:
            Fenced: if a newer learner was seen; nothing may be written or trimmed any more.
        """
        if self._fence is not None:
            raise self._fence

    def _check(self, newest: int) -> None:
        if newest > self.epoch:
            problem = (
                f"a newer learner took over under epoch {newest}, this one is epoch {self.epoch}"
            )
            self._fence = Fenced(f"run {self._bus.run}: {problem}")
            raise self._fence

    async def _follow_epoch(self) -> None:
        """Raise ``Fenced`` once a newer learner takes the run; restore a deleted RunSpec."""
        runs = self._bus.key_value(RUNS)
        async for message, revision in runs.watch(self._bus.run):
            if isinstance(message, wire.RunSpec):
                self._check(message.epoch)
            elif self._spec is not None:
                log.warning(
                    "the RunSpec of run %s was deleted or replaced; writing it again", self._bus.run
                )
                await runs.update(self._bus.run, self._spec, revision)

    async def _follow_control(self) -> None:
        control = self._bus.key_value(CONTROL)
        async for message, _ in control.watch(self._bus.run):
            if not isinstance(message, wire.DesiredState):
                continue
            if message.state in ENDINGS:
                self._stop.request(f"the run is {message.state}")
            elif self.paused != (message.state == "paused"):
                self.paused = not self.paused
                log.info("paused by the operator" if self.paused else "resumed by the operator")
                self._say("paused by the operator" if self.paused else "")
