"""Observe a run from outside while its processes are killed: steps, tickets in flight, recovery
times.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

from broker.contract import wire
from broker.contract.streams import SAMPLES, TICKETS
from broker.errors import RlearnerError
from broker.jetstream.bus import Bus
from learner.reporting.metrics import read_lines

LOOK_EVERY_S: Final = 0.02


class FleetWatch:
    """Reads the samples log from its beginning, and the run's metrics.

    Attributes:
        first: by ticket, the first record of the log that carries it, as (sequence, name of the
            message).
        repeated: records of tickets that had one already.
        redelivered: groups whose ticket was delivered more than once.
        reasons: why tickets were closed, and how many.
    """

    def __init__(self, bus: Bus, folder: Path) -> None:
        self._bus = bus
        self.folder = folder
        self.first: dict[int, tuple[int, str]] = {}
        self.repeated = 0
        self.redelivered = 0
        self.reasons: dict[str, int] = {}
        self._issued = 0
        self._blind: RlearnerError | None = None  # why the log is no longer read

    async def serve(self) -> None:
        """Follow the log until cancelled. What ends it earlier is raised by everyone who waits."""
        try:
            await self._follow()
        except RlearnerError as error:
            self._blind = error
            raise

    async def _follow(self) -> None:
        async with aclosing(self._bus.read_log(SAMPLES, 1)) as records:
            async for record in records:
                message = record.message
                ticket = (
                    message.ticket
                    if isinstance(message, wire.Group | wire.Closed)
                    else record.ticket
                )
                if ticket in self.first:
                    self.repeated += 1
                    continue
                self.first[ticket] = (record.seq, type(message).__name__)
                if isinstance(message, wire.Group) and message.deliveries > 1:
                    self.redelivered += 1
                if isinstance(message, wire.Closed):
                    self.reasons[message.reason] = self.reasons.get(message.reason, 0) + 1

    def lines(self) -> list[dict[str, Any]]:
        """Return the current contents of metrics.jsonl."""
        return read_lines(self.folder / "metrics.jsonl")

    def step(self) -> int:
        """Return the newest step with a line."""
        lines = self.lines()
        return int(lines[-1]["step"]) if lines else 0

    async def in_flight(self) -> set[int]:
        """Return the issued tickets without a record in the log."""
        self._issued = await self._bus.last_seq(TICKETS)
        return set(range(1, self._issued + 1)) - self.first.keys()

    async def until(
        self, what: Callable[[], bool], timeout_s: float, every_s: float = LOOK_EVERY_S
    ) -> float:
        """Return the seconds until ``what`` holds.

        Raises:
            TimeoutError: if it does not, and no ticket has ended and no step was done for
                ``timeout_s``.
            RlearnerError: without a log.
        """
        began = moved_at = time.monotonic()
        progress = (-1, -1)
        while not what():
            if self._blind is not None:
                raise self._blind
            if progress != (progress := (self.step(), len(self.first))):
                moved_at = time.monotonic()
            if time.monotonic() - moved_at > timeout_s:
                why = f"no progress for {timeout_s:g} s; newest step {self.step()}, {len(self.first)} tickets ended"
                raise TimeoutError(why)
            await asyncio.sleep(every_s)
        return time.monotonic() - began

    async def recovery_s(
        self, role: str, strike: Callable[[], Awaitable[None]], timeout_s: float = 60.0
    ) -> float:
        """Strike and return the seconds until the work in flight has arrived, or the learner has
        trained a new step.

        This is longer than until survivors hold the work of the victim. Raises TimeoutError without
        a recovery.
        """
        before = self.step()
        pending = await self.in_flight()
        began = time.monotonic()
        await strike()
        spent = time.monotonic() - began  # a broker's restart is part of its recovery
        if role == "learner":
            return spent + await self.until(lambda: self.step() > before, timeout_s)
        return spent + await self.until(lambda: pending <= self.first.keys(), timeout_s)
