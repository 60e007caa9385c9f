"""Runs dead tickets again for the operator: one at a time, outside the slots, storing nothing."""

from __future__ import annotations

import asyncio
import logging
from asyncio import Semaphore
from functools import partial
from typing import Final

from broker.contract import codec, wire
from broker.contract.streams import RERUNS
from broker.errors import TooLarge, WireError, described
from broker.jetstream.core_messages import answer_requests
from broker.runtime.process import Member
from envhub.domain import Domain
from envhub.episodes.runners import EpisodeRunners
from envhub.scheduling.slots import CLOSED_FOR
from envhub.task import EpisodeFailed, EpisodeResult
from envhub.tickets.assignment import TicketAssignment, assignment, group, reward_pools, task

log = logging.getLogger(__name__)

AT_ONCE: Final = 8  # episodes


class TicketReruns:
    """Answers the operator's requests; ``domains`` are those of the hub and may change."""

    def __init__(self, member: Member, players: EpisodeRunners, domains: dict[str, Domain]) -> None:
        self._member = member
        self._players = players
        self._domains = domains
        self._busy = False
        self._count = 0

    async def serve(self) -> None:
        """Answer requests until cancelled."""
        subscribed = await answer_requests(
            self._member.bus, RERUNS, f"envhub.{self._member.id}", self.answer
        )
        try:
            await asyncio.Event().wait()
        finally:
            await subscribed.close()

    async def answer(self, ticket: wire.Message) -> wire.Message | None:
        """Return the ticket's group, or why there is none; every episode is tried once."""
        if not isinstance(ticket, (wire.Ticket, wire.EvalTicket)):
            return None
        asked = assignment(ticket)
        if asked.domain not in self._domains:
            detail = f"this hub has no domain {asked.domain}; it has {', '.join(self._domains)}"
            return self._closed(asked, "malformed", detail)
        if self._busy or self._member.stop.asked.is_set():
            return self._closed(
                asked,
                "aborted",
                "this hub is running another ticket again, or is stopping; try again",
            )
        self._busy = True
        try:
            log.info(
                "running ticket %d of domain %s again for the operator", asked.number, asked.domain
            )
            return await self._play(asked, self._domains[asked.domain])
        finally:
            self._busy = False

    async def _play(self, asked: TicketAssignment, domain: Domain) -> wire.Message:
        self._count += 1
        few = Semaphore(AT_ONCE)
        work = [
            asyncio.create_task(self._episode(asked, domain, episode, few))
            for episode in range(asked.group_size)
        ]
        try:
            async with asyncio.timeout(asked.deadline_s):
                await asyncio.wait(work)
        except TimeoutError:
            done = sum(one.done() for one in work)
            short = f"{done} of {asked.group_size} episodes after {asked.deadline_s:g} s"
            return self._closed(asked, "deadline", short)
        finally:
            for one in work:
                one.cancel()
            results = await asyncio.gather(*work, return_exceptions=True)
        return self._outcome(asked, domain, results)

    async def _episode(
        self, asked: TicketAssignment, domain: Domain, episode: int, few: Semaphore
    ) -> EpisodeResult:
        name = f"{self._member.id}.rerun{self._count}.{asked.key}.{episode}"
        async with few:
            return await self._players.play(task(asked, domain, episode, name), lambda _: None)

    def _outcome(
        self, asked: TicketAssignment, domain: Domain, results: list[EpisodeResult | BaseException]
    ) -> wire.Message:
        closed = partial(self._closed, asked)
        played = [one for one in results if isinstance(one, EpisodeResult)]
        failed = [
            (episode, one) for episode, one in enumerate(results) if isinstance(one, BaseException)
        ]
        if failed:
            episode, error = failed[0]
            detail = error.detail if isinstance(error, EpisodeFailed) else described(error)
            reason = (
                CLOSED_FOR.get(error.kind, "aborted")
                if isinstance(error, EpisodeFailed)
                else "env_error"
            )
            return closed(
                reason,
                f"{len(failed)} of {len(results)} episodes failed; episode {episode}: {detail}",
            )
        pools = reward_pools(domain.section)
        temperature = domain.section.sampling.temperature
        found = group(
            asked, played, pools=pools, hub=self._member.id, deliveries=1, temperature=temperature
        )
        try:
            size = len(codec.encode(found))
        except WireError as error:
            return closed("too_large" if isinstance(error, TooLarge) else "malformed", str(error))
        if size > wire.MAX_PAYLOAD_BYTES:
            return closed(
                "too_large",
                f"the group is {size} bytes, an answer has room for {wire.MAX_PAYLOAD_BYTES}",
            )
        return found

    def _closed(
        self, asked: TicketAssignment, reason: wire.ClosedReason, detail: str
    ) -> wire.Closed:
        line = " ".join(detail.split())[:1000]
        by = self._member.id
        number = asked.number
        step = asked.eval_step
        return wire.Closed(
            ticket=number, domain=asked.domain, reason=reason, detail=line, by=by, eval_step=step
        )
