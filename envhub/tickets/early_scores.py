"""Has episodes scored while their group is still being played, by reward hubs with idle workers.

Each finished episode visits its reward pools by request and reply. What comes back is attached to
the group, and the reward hubs that take the group compute only what is missing. Nothing depends on
these requests: if one is lost, refused or fails, the group's own way through the pools replaces it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from typing import Any, Final

from msgspec.structs import replace

from broker.contract import wire
from broker.contract.streams import SCORES
from broker.errors import RequestFailed, RequestInvalid
from broker.jetstream.bus import Bus
from broker.jetstream.core_messages import send_request
from broker.settings.config import DomainSection
from envhub.task import EpisodeResult
from envhub.tickets.assignment import TicketAssignment, reward_pools

log = logging.getLogger(__name__)

# after the first and the last of several refusals: each request has the full text
ASK_AGAIN_S: Final = (0.1, 12.0)
# the environment's part of a reward; it then decides about success
ENV: Final = "env"
# a reward hub that has accepted a sample keeps its own time limits
REPLY_S: Final = 3600.0


class EarlyScores:
    """The scores that the episodes of one group have before it is complete.

    Args:
        wait_s: how long a complete group waits for scores that are being computed.
        judged: called with an episode and its success as soon as that is final.
    """

    def __init__(
        self,
        bus: Bus,
        assignment: TicketAssignment,
        section: DomainSection,
        wait_s: float,
        judged: Callable[[int, bool], None],
    ) -> None:
        self._bus = bus
        self._assignment = assignment
        self._wait_s = wait_s
        self._judged = judged
        self._has_rewards = bool(section.rewards)
        self._pools = reward_pools(section) if section.score_ahead else []
        self._scores: dict[int, wire.EpisodeScores] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._complete = asyncio.Event()  # the group; then no request is sent again

    def begin(self, result: EpisodeResult) -> None:
        """Have a finished episode scored, unless its group has ended."""
        if result.num_seats > 1:
            # each seat is an episode of its own in the group
            return
        last = result.trajectory
        # else the domain's first reward decides
        if not self._has_rewards or ENV in last.reward_parts:
            self._judged(last.episode, last.success)
        if self._pools and not self._complete.is_set():
            self._tasks.add(task := asyncio.create_task(self._visit(result)))
            task.add_done_callback(self._tasks.discard)

    @property
    def pending(self) -> bool:
        """Whether episodes are being scored."""
        return bool(self._tasks)

    async def take(self, episodes: Iterable[int], hurry: asyncio.Event) -> list[wire.EpisodeScores]:
        """Wait for scores on their way, unless ``hurry`` is set; return the group's scores."""
        self._complete.set()
        if self._tasks and not hurry.is_set():
            scored: asyncio.Future[Any] = asyncio.gather(*self._tasks, return_exceptions=True)
            leaving: asyncio.Future[Any] = asyncio.ensure_future(hurry.wait())
            await asyncio.wait(
                {scored, leaving}, timeout=self._wait_s, return_when=asyncio.FIRST_COMPLETED
            )
            leaving.cancel()
        self.cancel()
        return [self._scores[episode] for episode in episodes if episode in self._scores]

    def cancel(self) -> None:
        """Give up what is on its way; the group has ended."""
        self._complete.set()
        for task in self._tasks:
            task.cancel()

    async def _visit(self, result: EpisodeResult) -> None:
        message = score_request(self._assignment, result)
        for pool in self._pools:
            reply = await self._ask(pool, message)
            if reply is None or not reply.scores:
                return
            earlier = self._scores.get(message.episode)
            if earlier is not None and earlier.rewards != reply.rewards:
                # the run's rewards have changed in between
                return
            scores = list(reply.scores)
            if earlier is not None:
                scores = [*earlier.scores, *scores]
            self._scores[message.episode] = wire.EpisodeScores(
                episode=message.episode, rewards=reply.rewards, scores=scores
            )
            if reply.partial:
                return
            if pool == self._pools[0] and ENV not in message.reward_parts:
                self._judged(message.episode, reply.success)
            turns = message.turns
            if len(reply.turn_rewards) == len(turns):
                pairs = zip(turns, reply.turn_rewards, strict=True)
                turns = [replace(turn, reward=reward) for turn, reward in pairs]
            message = replace(
                message,
                reward=reply.reward,
                reward_parts=reply.reward_parts,
                success=reply.success,
                turns=turns,
            )

    async def _ask(
        self, pool: str, message: wire.EpisodeScoreRequest
    ) -> wire.EpisodeScoreReply | None:
        """Ask until a reward hub has time; None once the group is complete, or if it refuses."""
        delay_s, most_s = ASK_AGAIN_S
        while True:
            try:
                reply = await send_request(
                    self._bus,
                    SCORES,
                    pool,
                    message,
                    timeout_s=REPLY_S,
                    reply=wire.EpisodeScoreReply,
                )
                if not reply.busy:
                    return reply
            except RequestInvalid as error:
                log.warning(
                    "ticket %d, episode %d: not scored early: %s",
                    message.ticket,
                    message.episode,
                    error,
                )
                return None
            except RequestFailed:
                # nothing listens yet, or the hub died
                pass
            try:
                # at random, so that episodes do not ask in step
                await asyncio.wait_for(self._complete.wait(), delay_s * random.uniform(0.5, 1.5))
            except TimeoutError:
                delay_s = min(2 * delay_s, most_s)
            else:
                return None


def score_request(assignment: TicketAssignment, result: EpisodeResult) -> wire.EpisodeScoreRequest:
    """Return the request for one episode's scores; rewards see it as they would in its group."""
    last = result.trajectory
    turns = [turn for trajectory in result.trajectories for turn in trajectory.turns]
    return wire.EpisodeScoreRequest(
        ticket=assignment.number,
        domain=assignment.domain,
        task_index=assignment.task_index,
        episode=last.episode,
        prompt=result.prompt,
        reference=result.reference,
        response=last.response,
        reward=last.reward,
        reward_parts=last.reward_parts,
        success=last.success,
        end=last.end,
        metrics=last.metrics,
        num_turns=len(turns),
        num_tokens=sum(turn.end - turn.start for turn in turns),
        eval_step=assignment.eval_step,
        turns=[replace(turn, anchor="") for turn in turns],
        messages=[message for part in result.trajectories for message in part.messages],
        row=result.row,
    )
