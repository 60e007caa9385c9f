"""Keeps the notes from which hubs detect that a ticket kills the hubs that run it; see ``envhub.tickets.suspicion``."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from broker.contract import wire
from broker.contract.streams import ATTEMPTS
from broker.errors import LostState, WireError
from broker.jetstream.bus import Bus
from broker.jetstream.kv import KeyValue
from broker.runtime.presence import SILENT_AFTER_S, Roster
from broker.system.process_identity import has_ended, this_process
from envhub.tickets.assignment import TicketAssignment
from envhub.tickets.suspicion import TicketJudgement, judge

log = logging.getLogger(__name__)

LISTEN_S: Final = 1.0  # at a time, for the beats of a hub

T = TypeVar("T")


class AttemptNotes:
    """The notes of one run as one hub reads and writes them. A ticket that is delivered once costs nothing.

    Args:
        bus: of the run.
        hub: id of this hub.
    """

    def __init__(self, bus: Bus, hub: str) -> None:
        self._bus, self._hub, self._process = bus, hub, this_process()

    async def judge(self, asked: TicketAssignment, num_delivered: int) -> TicketJudgement | None:
        """Judge a delivery; None while another living hub plays the ticket alone."""
        past = await self._read(asked)
        if past is None or not past.hub:
            return judge(num_delivered, past, died=False)
        alive = await self._lives(past)
        return None if alive and past.alone else judge(num_delivered, past, died=not alive)

    async def begin(self, asked: TicketAssignment, judgement: TicketJudgement) -> None:
        """Note that this hub plays the ticket from now on; if it dies, others know."""
        await self._note(
            asked, wire.Attempt(deaths=judgement.deaths, hub=self._hub, process=self._process, alone=judgement.alone)
        )

    async def hand_back(self, asked: TicketAssignment, deaths: int) -> None:
        """Note that this hub no longer plays the ticket and is alive."""
        await self._note(asked, wire.Attempt(deaths=deaths))

    async def end(self, asked: TicketAssignment) -> None:
        """The ticket has ended: forget it."""
        await self._call(lambda bucket: bucket.delete(self._key(asked)))

    def _key(self, asked: TicketAssignment) -> str:
        return f"{self._bus.run}.{asked.stream.name}.{asked.number}"

    async def _note(self, asked: TicketAssignment, attempt: wire.Attempt) -> None:
        await self._call(lambda bucket: bucket.put(self._key(asked), attempt))

    async def _read(self, asked: TicketAssignment) -> wire.Attempt | None:
        try:
            found = await self._call(lambda bucket: bucket.get(self._key(asked)))
        except WireError as error:
            log.warning("%s: its note cannot be read: %s", asked.key, error)
            return None
        return found[0] if found is not None and isinstance(found[0], wire.Attempt) else None

    async def _call(self, work: Callable[[KeyValue], Awaitable[T]]) -> T:
        """Work with the bucket, which is gone after a restart of the broker: it is kept in memory, so that a full disk
        stops no hub.
        """
        bucket = await self._bus.key_value(ATTEMPTS)
        try:
            return await work(bucket)
        except LostState:
            await bucket.ensure()
            return await work(bucket)

    async def _lives(self, attempt: wire.Attempt) -> bool:
        """Whether the process that an attempt names still runs: asked of this machine if it ran here, else of its
        beats.
        """
        if has_ended(attempt.process):
            return False
        roster = Roster(self._bus, beats=())
        await roster.start()
        try:
            await roster.follow("envhub", [attempt.hub])
            while roster.clock < SILENT_AFTER_S:
                heard = roster.get(attempt.hub)
                if heard is not None and heard.process == attempt.process:
                    return True
                await roster.changed(LISTEN_S)
            return False
        finally:
            await roster.close()
