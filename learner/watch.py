"""Whether this learner still holds the run, and what the operator wants of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

from broker.contract import wire
from broker.contract.streams import CONTROL, RUNS
from broker.errors import Fenced
from broker.jetstream.bus import Bus
from broker.runtime.process import Stop, Stopped
from broker.settings.runspec import publish_runspec

log = logging.getLogger(__name__)

ENDINGS: Final = ("draining", "stopped")  # of the operator's words those after which a learner leaves


class Watch:
    """Takes the run's next epoch, then watches for a later one and for the operator's word.

    Args:
        say: told that the run is paused, and an empty text when it is not any more.

    Attributes:
        epoch: of this incarnation, 0 before it has taken one.
        paused: the operator has paused the run.
    """

    def __init__(self, bus: Bus, stop: Stop, say: Callable[[str], None]) -> None:
        self._bus, self._stop, self._say = bus, stop, say
        self.epoch = 0
        self.paused = False
        self._fence: Fenced | None = None
        self._said = 0  # revision of the operator's word when this learner began

    async def open(self) -> None:
        """Remember what the operator said last: to begin is to go on in spite of it, but not of what is said from here on."""
        _, self._said = await self._word()

    async def take_epoch(self, spec: wire.RunSpec, *, above: int = 0, seen: int | None = None) -> None:
        """From here on whoever held the run before is fenced, and everyone else may join.

        Args:
            above: newest epoch that was ever taken as far as the run's folder knows; the broker may have lost it.
            seen: newest epoch whose holder is known to be gone; None: take over from any.

        Raises:
            Fenced: another learner took an epoch above ``seen``.
            Stopped: it is to end; the run stays with whoever has it.
        """
        state, said = await self._word()
        if said != self._said and state in ENDINGS:
            self._stop.request(f"the run is {state}")
        if self._stop.asked.is_set():
            raise Stopped(self._stop.reason)
        self.epoch = await publish_runspec(self._bus, spec, above=above, seen=seen)
        if said == self._said and state == "paused":
            log.warning("run %s is paused, and stays so; go on with `rlearner resume %s`", self._bus.run, self._bus.run)
        elif said == self._said:
            control, running = await self._bus.key_value(CONTROL), wire.DesiredState(state="running")
            await (control.update(self._bus.run, running, said) if said else control.create(self._bus.run, running))
        log.info("epoch %d of run %s", self.epoch, self._bus.run)

    def services(self) -> list[Coroutine[Any, Any, None]]:
        """What follows both, each until cancelled."""
        return [self._follow_epoch(), self._follow_control()]

    async def put(self, desired: wire.DesiredState) -> None:
        """Tell everyone what the run is to be."""
        await (await self._bus.key_value(CONTROL)).put(self._bus.run, desired)

    async def desired(self) -> str:
        """What the run is to be as far as the broker knows, empty if nobody has said."""
        return (await self._word())[0]

    async def _word(self) -> tuple[str, int]:
        """The operator's, and its revision; empty and 0 where nobody has said any."""
        found = await (await self._bus.key_value(CONTROL)).get(self._bus.run)
        return (found[0].state, found[1]) if found is not None and isinstance(found[0], wire.DesiredState) else ("", 0)

    async def refuse_if_fenced(self) -> None:
        """Ask the broker whether this learner still holds the run.

        Raises:
            Fenced: a newer one does.
        """
        found = await (await self._bus.key_value(RUNS)).get(self._bus.run)
        if found is not None and isinstance(found[0], wire.RunSpec):
            self._check(found[0].epoch)

    def refuse_if_seen_fenced(self) -> None:
        """The same from what is known, whoever found out: the epoch that is followed here, or a checkpoint that asked.

        Raises:
            Fenced: a newer learner was seen; nothing may be written or trimmed any more.
        """
        if self._fence is not None:
            raise self._fence

    def _check(self, newest: int) -> None:
        if newest > self.epoch:
            self._fence = Fenced(f"run {self._bus.run}: a newer learner took over under epoch {newest}, this one is epoch {self.epoch}")
            raise self._fence

    async def _follow_epoch(self) -> None:
        """Leave the run to a newer incarnation."""
        runs = await self._bus.key_value(RUNS)
        async for message, _ in runs.watch(self._bus.run):
            if isinstance(message, wire.RunSpec):
                self._check(message.epoch)

    async def _follow_control(self) -> None:
        control = await self._bus.key_value(CONTROL)
        async for message, _ in control.watch(self._bus.run):
            if not isinstance(message, wire.DesiredState):
                continue
            if message.state in ENDINGS:
                self._stop.request(f"the run is {message.state}")
            elif self.paused != (message.state == "paused"):
                self.paused = not self.paused
                log.info("paused by the operator" if self.paused else "resumed by the operator")
                self._say("paused by the operator" if self.paused else "")
