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

# episodes; few, as the run's own episodes need the servers
AT_ONCE: Final = 8


class TicketReruns:
    """Answers the operator's requests; ``domains`` are those of the hub and may change."""

    def __init__(self, member: Member, runners: EpisodeRunners, domains: dict[str, Domain]) -> None:
        self._member = member
        self._runners = runners
        self._domains = domains
        self._busy = False
        self._count = 0

    async def serve(self) -> None:
        """Answer requests until cancelled."""
        subscription = await answer_requests(
            self._member.bus, RERUNS, f"envhub.{self._member.id}", self.answer
        )
        try:
            await asyncio.Event().wait()
        finally:
            await subscription.close()

    async def answer(self, ticket: wire.Message) -> wire.Message | None:
        """Return the ticket's group, or why there is none; every episode is tried once."""
        if not isinstance(ticket, (wire.Ticket, wire.EvalTicket)):
            return None
        ticket_assignment = assignment(ticket)
        if ticket_assignment.domain not in self._domains:
            detail = (
                f"this hub has no domain {ticket_assignment.domain}; "
                f"it has {', '.join(self._domains)}"
            )
            return self._closed(ticket_assignment, "malformed", detail)
        if self._busy or self._member.stop.asked.is_set():
            return self._closed(
                ticket_assignment,
                "aborted",
                "this hub is running another ticket again, or is stopping; try again",
            )
        self._busy = True
        try:
            log.info(
                "running ticket %d of domain %s again for the operator",
                ticket_assignment.number,
                ticket_assignment.domain,
            )
            return await self._play(ticket_assignment, self._domains[ticket_assignment.domain])
        finally:
            self._busy = False

    async def _play(self, assignment: TicketAssignment, domain: Domain) -> wire.Message:
        self._count += 1
        at_once = Semaphore(AT_ONCE)
        episode_tasks = [
            asyncio.create_task(self._episode(assignment, domain, episode, at_once))
            for episode in range(assignment.group_size)
        ]
        try:
            async with asyncio.timeout(assignment.deadline_s):
                await asyncio.wait(episode_tasks)
        except TimeoutError:
            num_done = sum(episode_task.done() for episode_task in episode_tasks)
            detail = (
                f"{num_done} of {assignment.group_size} episodes after {assignment.deadline_s:g} s"
            )
            return self._closed(assignment, "deadline", detail)
        finally:
            for episode_task in episode_tasks:
                episode_task.cancel()
            results = await asyncio.gather(*episode_tasks, return_exceptions=True)
        return self._outcome(assignment, domain, results)

    async def _episode(
        self, assignment: TicketAssignment, domain: Domain, episode: int, at_once: Semaphore
    ) -> EpisodeResult:
        name = f"{self._member.id}.rerun{self._count}.{assignment.key}.{episode}"
        async with at_once:
            return await self._runners.play(task(assignment, domain, episode, name), lambda _: None)

    def _outcome(
        self,
        assignment: TicketAssignment,
        domain: Domain,
        results: list[EpisodeResult | BaseException],
    ) -> wire.Message:
        close = partial(self._closed, assignment)
        episodes = [result for result in results if isinstance(result, EpisodeResult)]
        failures = [
            (episode, result)
            for episode, result in enumerate(results)
            if isinstance(result, BaseException)
        ]
        if failures:
            episode, error = failures[0]
            reason: wire.ClosedReason = "env_error"
            detail = described(error)
            if isinstance(error, EpisodeFailed):
                reason = CLOSED_FOR.get(error.kind, "aborted")
                detail = error.detail
            return close(
                reason,
                f"{len(failures)} of {len(results)} episodes failed; episode {episode}: {detail}",
            )
        pools = reward_pools(domain.section)
        temperature = domain.section.sampling.temperature
        message = group(
            assignment,
            episodes,
            pools=pools,
            hub=self._member.id,
            deliveries=1,
            temperature=temperature,
        )
        try:
            size = len(codec.encode(message))
        except WireError as error:
            return close("too_large" if isinstance(error, TooLarge) else "malformed", str(error))
        if size > wire.MAX_PAYLOAD_BYTES:
            return close(
                "too_large",
                f"the group is {size} bytes, an answer has room for {wire.MAX_PAYLOAD_BYTES}",
            )
        return message

    def _closed(
        self, assignment: TicketAssignment, reason: wire.ClosedReason, detail: str
    ) -> wire.Closed:
        return wire.Closed(
            ticket=assignment.number,
            domain=assignment.domain,
            reason=reason,
            detail=" ".join(detail.split())[:1000],
            by=self._member.id,
            eval_step=assignment.eval_step,
        )
