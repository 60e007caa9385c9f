"""What ends a ticket: its Group or Closed is stored first, then the ticket is acknowledged."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from broker.contract import wire
from broker.contract.streams import EVALTICKETS, TICKETS, Stream
from broker.errors import TooLarge, WireError
from broker.jetstream.bus import Delivery
from broker.jetstream.ticket_results import close_ticket
from broker.runtime.process import Member
from envhub.domain import Domain
from envhub.tally import HubMetrics
from envhub.task import EpisodeResult
from envhub.tickets.assignment import TicketAssignment, destination, group, reward_pools
from envhub.tickets.attempts import AttemptNotes
from envhub.tickets.suspicion import TicketJudgement

log = logging.getLogger(__name__)


@dataclass
class InHand:
    """A ticket in work.

    Attributes:
        judgement: of a ticket that was delivered before, None until it is known.
        beginning: held while the note is written that this hub plays such a ticket.
        begun: that note is written.
    """

    asked: TicketAssignment
    delivery: Delivery
    domain: Domain
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    played: dict[int, EpisodeResult] = field(default_factory=dict)
    judgement: TicketJudgement | None = None
    beginning: asyncio.Lock = field(default_factory=asyncio.Lock)
    begun: bool = False


class TicketOutbox:
    """Ends tickets in the background.

    Attributes:
        failure: why a ticket could not be ended, None while all goes well. The hub stops then: what was not
        acknowledged
            goes to another hub.
    """

    def __init__(self, member: Member, tally: HubMetrics, attempts: AttemptNotes) -> None:
        self._member, self._bus, self._tally, self._attempts = member, member.bus, tally, attempts
        self.failure: BaseException | None = None
        self._ending: set[asyncio.Task[None]] = set()

    def finish(self, held: InHand, played: Sequence[EpisodeResult]) -> None:
        """The ticket's group is these episodes."""
        self._background(self._finish(held, played))

    def close(self, held: InHand, reason: wire.ClosedReason, detail: str) -> None:
        """The ticket ends without a group."""
        self._background(self._close(held, reason, detail))

    def hand_back(self, held: InHand, delay_s: float, detail: str) -> None:
        """The ticket is for someone else."""
        self._background(self._hand_back(held, delay_s, detail))

    def refuse(self, stream: Stream, domain: str, delivery: Delivery, problem: str) -> None:
        """The message is no ticket of its queue; whatever ticket it stands for is closed."""
        self._background(self._refuse(stream, domain, delivery, problem))

    @property
    def is_empty(self) -> bool:
        """Whether everything is stored and acknowledged."""
        return not self._ending

    async def empty(self, timeout_s: float) -> None:
        """Wait until everything is stored and acknowledged."""
        if self._ending:
            await asyncio.wait(self._ending, timeout=timeout_s)

    async def _finish(self, held: InHand, played: Sequence[EpisodeResult]) -> None:
        asked, pools = held.asked, reward_pools(held.domain.section)
        message = group(
            asked,
            played,
            pools=pools,
            hub=self._member.id,
            deliveries=held.delivery.num_delivered,
            temperature=held.domain.section.sampling.temperature,
        )
        stream, key = destination(asked, pools)
        try:
            await self._bus.publish(stream, message, key=key, ticket=asked.number, message_id=asked.key)
        except WireError as error:
            await self._close(held, "too_large" if isinstance(error, TooLarge) else "malformed", str(error))
            return
        self._tally.groups += 1
        await held.delivery.ack()
        if held.delivery.num_delivered > 1:
            await self._attempts.end(asked)

    async def _close(self, held: InHand, reason: wire.ClosedReason, detail: str) -> None:
        asked = held.asked
        await self._end(asked.stream, held.delivery, asked.number, asked.domain, reason, detail, asked.eval_step)
        if held.delivery.num_delivered > 1:
            await self._attempts.end(asked)

    async def _hand_back(self, held: InHand, delay_s: float, detail: str) -> None:
        log.info("%s handed back: %s", held.asked.key, detail)
        self._tally.handed_back += 1
        # else the note of the hub before still holds
        if held.judgement is not None or held.delivery.num_delivered == 1:
            await self._attempts.hand_back(held.asked, held.judgement.deaths if held.judgement is not None else 0)
        await held.delivery.nak(delay_s)

    async def _refuse(self, stream: Stream, domain: str, delivery: Delivery, problem: str) -> None:
        number = delivery.ticket or (delivery.seq if stream is TICKETS else 0)  # a ticket's number is its sequence
        await self._end(stream, delivery, number, domain, "malformed", problem)

    async def _end(
        self,
        stream: Stream,
        delivery: Delivery,
        number: int,
        domain: str,
        reason: wire.ClosedReason,
        detail: str,
        eval_step: int = -1,
    ) -> None:
        closed = wire.Closed(
            ticket=number, domain=domain, reason=reason, detail=detail, by=self._member.id, eval_step=eval_step
        )
        self._tally.closed += number > 0
        evaluation, keep = stream is EVALTICKETS, reason != "late"
        await close_ticket(self._bus, delivery, stream, closed, evaluation=evaluation, keep=keep)

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._ending.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failure = self.failure or error
            self._member.stop.request(f"{type(error).__name__}: {error}")
