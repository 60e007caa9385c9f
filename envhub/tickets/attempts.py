"""Keeps the notes that reveal tickets which kill their hubs; see ``envhub.tickets.suspicion``."""

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

LISTEN_S: Final = 1.0  # between two looks for the beats of a hub

T = TypeVar("T")


class AttemptNotes:
    """Reads and writes one run's notes for the hub with id ``hub``. A ticket that is delivered once
    costs nothing.
    """

    def __init__(self, bus: Bus, hub: str) -> None:
        self._bus, self._hub, self._process = bus, hub, this_process()

    async def judge(self, asked: TicketAssignment, num_delivered: int) -> TicketJudgement | None:
        """Judge a delivery; None while another live hub plays the ticket alone."""
        past = await self._read(asked)
        if past is None or not past.hub:
            return judge(num_delivered, past, died=False)
        alive = await self._lives(past)
        return None if alive and past.alone else judge(num_delivered, past, died=not alive)

    async def begin(self, asked: TicketAssignment, judgement: TicketJudgement) -> None:
        """Note that this hub plays the ticket from now on, for the other hubs if it dies."""
        deaths = judgement.deaths
        alone = judgement.alone
        await self._note(
            asked, wire.Attempt(deaths=deaths, hub=self._hub, process=self._process, alone=alone)
        )

    async def hand_back(self, asked: TicketAssignment, deaths: int) -> None:
        """Note that this hub no longer plays the ticket and is alive."""
        await self._note(asked, wire.Attempt(deaths=deaths))

    async def end(self, asked: TicketAssignment) -> None:
        """Delete the note of a ticket that has ended."""
        await self._call(lambda bucket: bucket.delete(self._key(asked)))

    def _key(self, asked: TicketAssignment) -> str:
        return f"{self._bus.run}.{asked.stream.name}.{asked.number}"

    async def _note(self, asked: TicketAssignment, attempt: wire.Attempt) -> None:
        await self._call(lambda bucket: bucket.put(self._key(asked), attempt))

    async def _read(self, asked: TicketAssignment) -> wire.Attempt | None:
        try:
            entry = await self._call(lambda bucket: bucket.get(self._key(asked)))
        except WireError as error:
            log.warning("%s: its note cannot be read: %s", asked.key, error)
            return None
        return entry[0] if entry is not None and isinstance(entry[0], wire.Attempt) else None

    async def _call(self, work: Callable[[KeyValue], Awaitable[T]]) -> T:
        """Call with the bucket, created again if the broker restarted: it is in memory, so a full
        disk stops no hub.
        """
        bucket = self._bus.key_value(ATTEMPTS)
        try:
            return await work(bucket)
        except LostState:
            await bucket.ensure()
            return await work(bucket)

    async def _lives(self, attempt: wire.Attempt) -> bool:
        """Return whether an attempt's process is alive, according to this machine or else to its
        beats.
        """
        if has_ended(attempt.process):
            return False
        roster = Roster(self._bus, beats=())
        await roster.start()
        try:
            await roster.follow("envhub", [attempt.hub])
            while roster.clock < SILENT_AFTER_S:
                presence = roster.get(attempt.hub)
                if presence is not None and presence.process == attempt.process:
                    return True
                await roster.changed(LISTEN_S)
            return False
        finally:
            await roster.close()
