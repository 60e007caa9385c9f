"""Scores episodes whose group is not complete yet, with workers that would otherwise be idle.

The scores are only a head start: they travel back to the environment hub, which attaches them to
the group, and the reward hub that takes the group computes those that are missing. A request that
gets lost or fails costs only time. Groups never wait for such a request: it is taken only if a
worker is idle, and refused as busy otherwise.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial

from broker.contract import codec, wire
from broker.contract.streams import SCORES
from broker.errors import WireError
from broker.jetstream.bus import Bus
from broker.jetstream.core_messages import answer_requests
from broker.nats.subscription import LinkSubscription
from broker.runtime.spans import SpanRecorder
from broker.settings.config import DomainSection, RewardConfig
from rewardhub.config import reward_labels
from rewardhub.episode_samples import sample_of_request
from rewardhub.rewards.base import Sample, Scored
from rewardhub.routing import add_scores, rewards_digest
from rewardhub.score_dispatcher import ScoreDispatcher
from rewardhub.turn_scores import add_turn_scores
from rewardhub.worker_pool import NoWorkerError, ScoreError

log = logging.getLogger(__name__)

BUSY = wire.EpisodeScoreReply(busy=True)


class AheadScorer:
    """Answers the requests of environment hubs for the scores of single episodes.

    Args:
        domains: returns the domains of the run at present.
        takes: whether a pool takes work at present.

    Attributes:
        num_scored: episodes scored so far.
    """

    def __init__(
        self,
        bus: Bus,
        scorers: ScoreDispatcher,
        domains: Callable[[], dict[str, DomainSection]],
        takes: Callable[[str], bool],
        spans: SpanRecorder,
    ) -> None:
        self._bus = bus
        self._scorers = scorers
        self._domains = domains
        self._takes = takes
        self._spans = spans
        self._answering: dict[str, LinkSubscription] = {}  # by pool
        # of samples that processes are about to get, once for each score
        self._promised: list[RewardConfig] = []
        self.num_scored = 0

    async def serve(self, pools: Iterable[str]) -> None:
        """Answer for these pools, and no longer for others."""
        wanted_pools = set(pools)
        for pool in self._answering.keys() - wanted_pools:
            await self._answering.pop(pool).close()
        for pool in wanted_pools - self._answering.keys():
            self._answering[pool] = await answer_requests(
                self._bus, SCORES, pool, partial(self.answer, pool), shared=True
            )

    async def answer(self, pool: str, request: wire.Message) -> wire.EpisodeScoreReply:
        """Return the scores of one episode by the rewards of a pool, without those that fail."""
        try:
            reply = await self._answer(pool, request)
            codec.encode(reply)
        except WireError as error:
            # The scores add up to infinity, or are too large.
            log.warning("the scores of an episode cannot be sent: %s", error)
            return wire.EpisodeScoreReply()
        except Exception:
            log.exception("an episode was not scored early")
            # The group would wait for an answer.
            return wire.EpisodeScoreReply()
        return reply

    async def _answer(self, pool: str, request: wire.Message) -> wire.EpisodeScoreReply:
        if not isinstance(request, wire.EpisodeScoreRequest) or request.domain not in (
            domains := self._domains()
        ):
            return wire.EpisodeScoreReply()
        rewards = domains[request.domain].rewards
        mine = {index: reward for index, reward in enumerate(rewards) if reward.pool == pool}
        if not self._takes(pool) or not self._scorers.has_room(list(mine.values()), self._promised):
            return BUSY
        sample = sample_of_request(request, domains[request.domain].max_turns)
        promised = list(mine.values())
        self._promised += promised
        ticket = request.ticket if request.eval_step < 0 else 0
        scores_of = (self._score(outcome, sample, promised) for outcome in mine.values())
        try:
            with self._spans.work("reward", ticket=ticket):
                outcomes = await asyncio.gather(*scores_of, return_exceptions=True)
        finally:
            # Cancelled before it began.
            for reward in promised:
                self._promised.remove(reward)
        scores = {
            r: outcome
            for r, outcome in zip(mine, outcomes, strict=True)
            if isinstance(outcome, Scored)
        }
        for outcome in outcomes:
            if not isinstance(outcome, Scored | ScoreError | NoWorkerError):
                raise outcome
        if not scores:
            # The group's pool tries again, and decides.
            return wire.EpisodeScoreReply()
        is_partial = len(scores) < len(mine)
        self.num_scored += not is_partial
        total, parts, success = add_scores(request.reward, request.reward_parts, scores, rewards)
        labels = reward_labels(rewards)
        return wire.EpisodeScoreReply(
            rewards=rewards_digest(rewards),
            scores=[
                wire.RewardScore(reward=labels[r], value=s.value, notes=s.notes)
                for r, s in scores.items()
            ],
            reward=total,
            reward_parts=parts,
            success=request.success if success is None else success,
            partial=is_partial,
            turn_rewards=add_turn_scores([turn.reward for turn in request.turns], scores, rewards),
        )

    async def _score(
        self, reward: RewardConfig, sample: Sample, promised: list[RewardConfig]
    ) -> Scored:
        promised.remove(reward)
        self._promised.remove(reward)
        return await self._scorers.score(reward, sample)

    async def close(self) -> None:
        """Answer no more requests."""
        await self.serve(())
