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
        beginning: held while the note is written that this hub plays a redelivered ticket.
        names: ids of the tasks of its episodes.
        cut: expected lengths in tokens of episodes that were aborted because the group was complete
            without them.
        begun: that note is written.
    """

    asked: TicketAssignment
    delivery: Delivery
    domain: Domain
    early: EarlyScores
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    played: dict[int, EpisodeResult] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    cut: list[int] = field(default_factory=list)
    judgement: TicketJudgement | None = None
    beginning: asyncio.Lock = field(default_factory=asyncio.Lock)
    begun: bool = False


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

    def finish(self, held: InHand, played: Sequence[EpisodeResult]) -> None:
        """End a ticket with the group of these episodes."""
        self._background(self._finish(held, played))

    def close(self, held: InHand, reason: wire.ClosedReason, detail: str) -> None:
        """End a ticket without a group."""
        held.early.cancel()
        self._background(self._close(held, reason, detail))

    def hand_back(self, held: InHand, delay_s: float, detail: str) -> None:
        """Return a ticket to the queue for another hub."""
        held.early.cancel()
        self._background(self._hand_back(held, delay_s, detail))

    def abandon(self, held: InHand) -> None:
        """Leave a ticket that other hubs may play by now to them, without a word."""
        held.early.cancel()
        held.delivery.abandon()

    def refuse(self, stream: Stream, domain: str, delivery: Delivery, problem: str) -> None:
        """Refuse a message that is not a ticket of its queue; a ticket with its number is closed."""
        self._background(self._refuse(stream, domain, delivery, problem))

    @property
    def is_empty(self) -> bool:
        """Whether everything is stored and acknowledged."""
        return not self._ending

    async def empty(self, timeout_s: float) -> None:
        """Wait until everything is stored and acknowledged; groups wait no longer for early scores."""
        self._hurry.set()
        if self._ending:
            await asyncio.wait(self._ending, timeout=timeout_s)

    async def _finish(self, held: InHand, played: Sequence[EpisodeResult]) -> None:
        assigned = held.asked
        pools = reward_pools(held.domain.section)
        deliveries = held.delivery.num_delivered
        temperature = held.domain.section.sampling.temperature
        scores = await held.early.take(
            [result.trajectory.episode for result in played], self._hurry
        )
        message = group(
            assigned,
            played,
            pools=pools,
            hub=self._member.id,
            deliveries=deliveries,
            temperature=temperature,
            scores=scores,
        )
        stream, key = destination(assigned, pools)
        try:
            await self._bus.publish(
                stream, message, key=key, ticket=assigned.number, message_id=assigned.key
            )
        except WireError as error:
            await self._close(
                held, "too_large" if isinstance(error, TooLarge) else "malformed", str(error)
            )
            return
        self._tally.groups += 1
        await held.delivery.ack()
        if held.delivery.num_delivered > 1:
            await self._attempts.end(assigned)

    async def _close(self, held: InHand, reason: wire.ClosedReason, detail: str) -> None:
        assigned = held.asked
        by = self._member.id
        closed = wire.Closed(
            ticket=assigned.number,
            domain=assigned.domain,
            reason=reason,
            detail=detail,
            by=by,
            eval_step=assigned.eval_step,
        )
        is_ended = await self._end(assigned.stream, held.delivery, closed)
        if is_ended and held.delivery.num_delivered > 1:
            await self._attempts.end(assigned)

    async def _hand_back(self, held: InHand, delay_s: float, detail: str) -> None:
        if not held.delivery.is_ours:
            held.delivery.abandon()
            return
        log.info("%s handed back: %s", held.asked.key, detail)
        self._tally.handed_back += 1
        # else the previous hub's note is still valid
        if held.judgement is not None or held.delivery.num_delivered == 1:
            await self._attempts.hand_back(
                held.asked, held.judgement.deaths if held.judgement is not None else 0
            )
        await held.delivery.nak(delay_s)

    async def _refuse(self, stream: Stream, domain: str, delivery: Delivery, problem: str) -> None:
        # a ticket's number is its sequence
        number = delivery.ticket or (delivery.seq if stream is TICKETS else 0)
        by = self._member.id
        closed = wire.Closed(
            ticket=number, domain=domain, reason="malformed", detail=problem, by=by, eval_step=-1
        )
        await self._end(stream, delivery, closed)

    async def _end(self, stream: Stream, delivery: Delivery, closed: wire.Closed) -> bool:
        evaluation = stream is EVALTICKETS
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
