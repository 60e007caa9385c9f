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
        assigned = assignment(ticket)
        if assigned.domain not in self._domains:
            detail = f"this hub has no domain {assigned.domain}; it has {', '.join(self._domains)}"
            return self._closed(assigned, "malformed", detail)
        if self._busy or self._member.stop.asked.is_set():
            return self._closed(
                assigned,
                "aborted",
                "this hub is running another ticket again, or is stopping; try again",
            )
        self._busy = True
        try:
            log.info(
                "running ticket %d of domain %s again for the operator",
                assigned.number,
                assigned.domain,
            )
            return await self._play(assigned, self._domains[assigned.domain])
        finally:
            self._busy = False

    async def _play(self, assigned: TicketAssignment, domain: Domain) -> wire.Message:
        self._count += 1
        few = Semaphore(AT_ONCE)
        work = [
            asyncio.create_task(self._episode(assigned, domain, episode, few))
            for episode in range(assigned.group_size)
        ]
        try:
            async with asyncio.timeout(assigned.deadline_s):
                await asyncio.wait(work)
        except TimeoutError:
            num_done = sum(task.done() for task in work)
            short = f"{num_done} of {assigned.group_size} episodes after {assigned.deadline_s:g} s"
            return self._closed(assigned, "deadline", short)
        finally:
            for task in work:
                task.cancel()
            results = await asyncio.gather(*work, return_exceptions=True)
        return self._outcome(assigned, domain, results)

    async def _episode(
        self, assigned: TicketAssignment, domain: Domain, episode: int, few: Semaphore
    ) -> EpisodeResult:
        name = f"{self._member.id}.rerun{self._count}.{assigned.key}.{episode}"
        async with few:
            return await self._players.play(task(assigned, domain, episode, name), lambda _: None)

    def _outcome(
        self,
        assigned: TicketAssignment,
        domain: Domain,
        results: list[EpisodeResult | BaseException],
    ) -> wire.Message:
        closed = partial(self._closed, assigned)
        episodes = [result for result in results if isinstance(result, EpisodeResult)]
        failed = [
            (episode, result)
            for episode, result in enumerate(results)
            if isinstance(result, BaseException)
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
        record = group(
            assigned,
            episodes,
            pools=pools,
            hub=self._member.id,
            deliveries=1,
            temperature=temperature,
        )
        try:
            size = len(codec.encode(record))
        except WireError as error:
            return closed("too_large" if isinstance(error, TooLarge) else "malformed", str(error))
        if size > wire.MAX_PAYLOAD_BYTES:
            return closed(
                "too_large",
                f"the group is {size} bytes, an answer has room for {wire.MAX_PAYLOAD_BYTES}",
            )
        return record

    def _closed(
        self, assigned: TicketAssignment, reason: wire.ClosedReason, detail: str
    ) -> wire.Closed:
        line = " ".join(detail.split())[:1000]
        by = self._member.id
        number = assigned.number
        step = assigned.eval_step
        return wire.Closed(
            ticket=number, domain=assigned.domain, reason=reason, detail=line, by=by, eval_step=step
        )
