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

# between two looks for the beats of a hub
LISTEN_S: Final = 1.0

T = TypeVar("T")


class AttemptNotes:
    """Reads and writes one run's notes for the hub with id ``hub``.

    A ticket that is delivered once costs nothing.
    """

    def __init__(self, bus: Bus, hub: str) -> None:
        self._bus = bus
        self._hub = hub
        self._process = this_process()

    async def judge(
        self, assignment: TicketAssignment, num_delivered: int
    ) -> TicketJudgement | None:
        """Judge a delivery of a ticket that this hub does not play; None while another live hub
        plays it alone.
        """
        past = await self._read(assignment)
        if past is None or not past.hub or self._is_own(past):
            return judge(num_delivered, past, died=False)
        is_alive = await self._lives(past)
        if is_alive and past.alone:
            return None
        return judge(num_delivered, past, died=not is_alive)

    def _is_own(self, past: wire.Attempt) -> bool:
        return past.hub == self._hub and past.process == self._process

    async def begin(self, assignment: TicketAssignment, judgement: TicketJudgement) -> int:
        """Note that this hub plays the ticket from now on, for the other hubs if it dies; return
        the note's revision.
        """
        attempt = wire.Attempt(
            deaths=judgement.deaths,
            hub=self._hub,
            process=self._process,
            alone=judgement.alone,
        )
        return await self._note(assignment, attempt)

    async def withdraw(self, assignment: TicketAssignment, deaths: int, revision: int) -> None:
        """Note that this hub no longer plays the ticket and is alive, unless another hub has noted
        something since.

        Args:
            revision: of this hub's note.
        """
        key = self._key(assignment)
        attempt = wire.Attempt(deaths=deaths)
        await self._call(lambda bucket: bucket.update(key, attempt, revision))

    async def hand_back(self, assignment: TicketAssignment, deaths: int) -> None:
        """Note that this hub no longer plays the ticket and is alive."""
        await self._note(assignment, wire.Attempt(deaths=deaths))

    async def end(self, assignment: TicketAssignment) -> None:
        """Delete the note of a ticket that has ended."""
        await self._call(lambda bucket: bucket.delete(self._key(assignment)))

    def _key(self, assignment: TicketAssignment) -> str:
        return f"{self._bus.run}.{assignment.stream.name}.{assignment.number}"

    async def _note(self, assignment: TicketAssignment, attempt: wire.Attempt) -> int:
        return await self._call(lambda bucket: bucket.put(self._key(assignment), attempt))

    async def _read(self, assignment: TicketAssignment) -> wire.Attempt | None:
        try:
            entry = await self._call(lambda bucket: bucket.get(self._key(assignment)))
        except WireError as error:
            log.warning("%s: its note cannot be read: %s", assignment.key, error)
            return None
        if entry is None or not isinstance(entry[0], wire.Attempt):
            return None
        return entry[0]

    async def _call(self, work: Callable[[KeyValue], Awaitable[T]]) -> T:
        """Call with the bucket, which is in memory, so that a full disk stops no hub."""
        bucket = self._bus.key_value(ATTEMPTS)
        try:
            return await work(bucket)
        except LostState:
            # a broker that restarted has lost it
            await bucket.ensure()
            return await work(bucket)

    async def _lives(self, attempt: wire.Attempt) -> bool:
        """Return whether an attempt's process lives, by this machine or else by its beats."""
        if has_ended(attempt.process):
            return False
        roster = Roster(self._bus, beats=())
        await roster.start()
        try:
            await roster.follow("envhub", [attempt.hub])
            # a live hub is heard within this time
            while roster.clock < SILENT_AFTER_S:
                presence = roster.get(attempt.hub)
                if presence is not None and presence.process == attempt.process:
                    return True
                await roster.changed(LISTEN_S)
            return False
        finally:
            await roster.close()
