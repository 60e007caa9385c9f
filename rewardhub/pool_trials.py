"""Tests a failing pool by scoring failed episodes again; uses no result and no delivery."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final

import msgspec

from broker.contract import wire
from broker.settings.config import DomainSection
from rewardhub.routing import ForwardAction, GroupScoring
from rewardhub.score_dispatcher import ScoreDispatcher
from rewardhub.scoring_job import score_group
from rewardhub.worker_pool import NoWorkerError

MAX_KEPT: Final = 5  # per pool


class PoolTrials:
    """The newest episodes of each pool that could not be scored, one per group."""

    def __init__(self) -> None:
        self._kept: dict[str, deque[wire.Group]] = {}

    def keep(self, pool: str, scoring: GroupScoring) -> None:
        """Keep the failed episode for later trials of its pool."""
        failed = [
            trajectory
            for trajectory in scoring.group.trajectories
            if trajectory.episode == scoring.failed_episode
        ]
        samples = self._kept.setdefault(pool, deque(maxlen=MAX_KEPT))
        samples.append(msgspec.structs.replace(scoring.group, trajectories=failed, scores=[]))

    def forget(self, pool: str) -> None:
        """Drop the episodes of a pool that works."""
        self._kept.pop(pool, None)

    async def trial(
        self, pool: str, domains: Mapping[str, DomainSection], scorers: ScoreDispatcher
    ) -> tuple[bool, str]:
        """Score one of them again. Return whether it succeeded, and the failure.

        Each is tried once: if all of them are themselves at fault, the next real groups are the
        trial.
        """
        samples = self._kept.get(pool)
        while samples:
            group = samples.popleft()
            if group.domain in domains:
                section = domains[group.domain]
                scoring = GroupScoring(group, section.rewards, 0)
                try:
                    ending = await score_group(scoring, section, scorers)
                except NoWorkerError as error:
                    # The episode is not at fault.
                    samples.append(group)
                    return False, str(error)
                return isinstance(ending, ForwardAction), "" if isinstance(
                    ending, ForwardAction
                ) else ending.detail
        return True, ""
