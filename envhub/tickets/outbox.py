"""Ends tickets: stores the Group or Closed first, then acknowledges the ticket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from broker.contract import wire
from broker.contract.streams import EVALTICKETS, TICKETS, Stream
from broker.errors import TooLarge, WireError, described
from broker.jetstream.bus import Delivery
from broker.jetstream.ticket_results import close_ticket
from broker.runtime.process import Member
from envhub.domain import Domain
from envhub.tally import HubMetrics
from envhub.task import EpisodeResult
from envhub.tickets.assignment import TicketAssignment, destination, group, reward_pools
from envhub.tickets.attempts import AttemptNotes
from envhub.tickets.early_scores import EarlyScores
from envhub.tickets.suspicion import TicketJudgement

log = logging.getLogger(__name__)


@dataclass
class InHand:
    """A ticket that this hub has taken.

    Attributes:
        early: scores of episodes before the group is complete.
        judgement: of a redelivered ticket, None until it is known.
        note_lock: held while the note is written that this hub plays a redelivered ticket.
        task_ids: ids of the tasks of its episodes.
        cut_lengths: expected lengths in tokens of episodes that were aborted because the group was
            complete without them.
        note_revision: revision of that note; None until it is written.
    """

    assignment: TicketAssignment
    delivery: Delivery
    domain: Domain
    early: EarlyScores
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    results: dict[int, EpisodeResult] = field(default_factory=dict)
    task_ids: dict[int, str] = field(default_factory=dict)
    cut_lengths: list[int] = field(default_factory=list)
    judgement: TicketJudgement | None = None
    note_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    note_revision: int | None = None


class TicketOutbox:
    """Ends tickets in the background.

    Attributes:
        failure: why a ticket could not be ended, if so. The hub then stops, and other hubs get what
            it did not acknowledge.
    """

    def __init__(self, member: Member, tally: HubMetrics, attempts: AttemptNotes) -> None:
        self._member = member
        self._bus = member.bus
        self._tally = tally
        self._attempts = attempts
        self.failure: BaseException | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._hurry = asyncio.Event()

    def finish(self, ticket: InHand, results: Sequence[EpisodeResult]) -> None:
        """End a ticket with the group of these episodes."""
        self._background(self._finish(ticket, results))

    def close(self, ticket: InHand, reason: wire.ClosedReason, detail: str) -> None:
        """End a ticket without a group."""
        ticket.early.cancel()
        self._background(self._close(ticket, reason, detail))

    def hand_back(self, ticket: InHand, delay_s: float, detail: str) -> None:
        """Return a ticket to the queue for another hub."""
        ticket.early.cancel()
        self._background(self._hand_back(ticket, delay_s, detail))

    def abandon(self, ticket: InHand) -> None:
        """Drop a ticket that other hubs may play by now, without a message to the learner."""
        ticket.early.cancel()
        ticket.delivery.abandon()
        self._background(self._withdraw_note(ticket))

    def refuse(self, stream: Stream, domain: str, delivery: Delivery, problem: str) -> None:
        """Refuse a message that is not a ticket of its queue; close the ticket of its number."""
        self._background(self._refuse(stream, domain, delivery, problem))

    @property
    def is_empty(self) -> bool:
        """Whether everything is stored and acknowledged."""
        return not self._ending

    async def empty(self, timeout_s: float) -> None:
        """Wait until all is stored and acknowledged; groups no longer wait for early scores."""
        self._hurry.set()
        if self._ending:
            await asyncio.wait(self._ending, timeout=timeout_s)

    async def _finish(self, ticket: InHand, results: Sequence[EpisodeResult]) -> None:
        assignment = ticket.assignment
        pools = reward_pools(ticket.domain.section)
        deliveries = ticket.delivery.num_delivered
        temperature = ticket.domain.section.sampling.temperature
        scores = await ticket.early.take(
            [result.trajectory.episode for result in results], self._hurry
        )
        message = group(
            assignment,
            results,
            pools=pools,
            hub=self._member.id,
            deliveries=deliveries,
            temperature=temperature,
            scores=scores,
        )
        stream, key = destination(assignment, pools)
        try:
            await self._bus.publish(
                stream, message, key=key, ticket=assignment.number, message_id=assignment.key
            )
        except WireError as error:
            await self._close(
                ticket, "too_large" if isinstance(error, TooLarge) else "malformed", str(error)
            )
            return
        self._tally.groups += 1
        # only now: if this hub dies before, another one plays the ticket
        await ticket.delivery.ack()
        if ticket.delivery.num_delivered > 1:
            await self._attempts.end(assignment)

    async def _close(self, ticket: InHand, reason: wire.ClosedReason, detail: str) -> None:
        assignment = ticket.assignment
        closed = wire.Closed(
            ticket=assignment.number,
            domain=assignment.domain,
            reason=reason,
            detail=detail,
            by=self._member.id,
            eval_step=assignment.eval_step,
        )
        is_ended = await self._end(assignment.stream, ticket.delivery, closed)
        if not is_ended:
            await self._withdraw_note(ticket)
        elif ticket.delivery.num_delivered > 1:
            await self._attempts.end(assignment)

    async def _withdraw_note(self, ticket: InHand) -> None:
        """Let other hubs play a suspect ticket, which they would leave to this live hub."""
        async with ticket.note_lock:
            revision = ticket.note_revision
            if revision is not None and ticket.judgement is not None:
                await self._attempts.withdraw(ticket.assignment, ticket.judgement.deaths, revision)

    async def _hand_back(self, ticket: InHand, delay_s: float, detail: str) -> None:
        if not ticket.delivery.is_ours:
            ticket.delivery.abandon()
            await self._withdraw_note(ticket)
            return
        log.info("%s handed back: %s", ticket.assignment.key, detail)
        self._tally.handed_back += 1
        if ticket.judgement is not None:
            await self._attempts.hand_back(ticket.assignment, ticket.judgement.deaths)
        elif ticket.delivery.num_delivered == 1:
            await self._attempts.hand_back(ticket.assignment, 0)
        # else the previous hub's note is still valid
        await ticket.delivery.nak(delay_s)

    async def _refuse(self, stream: Stream, domain: str, delivery: Delivery, problem: str) -> None:
        # a ticket's number is its sequence
        number = delivery.ticket or (delivery.seq if stream is TICKETS else 0)
        closed = wire.Closed(
            ticket=number,
            domain=domain,
            reason="malformed",
            detail=problem,
            by=self._member.id,
            eval_step=-1,
        )
        await self._end(stream, delivery, closed)

    async def _end(self, stream: Stream, delivery: Delivery, closed: wire.Closed) -> bool:
        evaluation = stream is EVALTICKETS
        # expected ends, of which the operator needs no dead letter
        keep = closed.reason not in ("late", "filtered")
        is_ended = await close_ticket(
            self._bus, delivery, stream, closed, evaluation=evaluation, keep=keep
        )
        self._tally.closed += is_ended and closed.ticket > 0
        return is_ended

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._ending.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failure = self.failure or error
            self._member.stop.request(described(error))
