"""Trials of a pool whose groups fail here: episodes that failed are scored again and the scores thrown away, which costs no delivery."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final

import msgspec

from broker.contract import wire
from broker.settings.config import DomainSection
from rewardhub.routing import Forward, Scoring
from rewardhub.scorers import Scorers
from rewardhub.scoring_job import carry_out
from rewardhub.workers import NoWorker

MAX_KEPT: Final = 5  # of a pool


class Trials:
    """The newest episodes of each pool that could not be scored, one of a group."""

    def __init__(self) -> None:
        self._kept: dict[str, deque[wire.Group]] = {}

    def keep(self, pool: str, scoring: Scoring) -> None:
        """Keep the episode that failed, for later trials of its pool."""
        failed = [one for one in scoring.group.trajectories if one.episode == scoring.failed_episode]
        kept = self._kept.setdefault(pool, deque(maxlen=MAX_KEPT))
        kept.append(msgspec.structs.replace(scoring.group, trajectories=failed))

    def forget(self, pool: str) -> None:
        """The pool works."""
        self._kept.pop(pool, None)

    async def trial(self, pool: str, domains: Mapping[str, DomainSection], scorers: Scorers) -> tuple[bool, str]:
        """Score one of them again. Return whether it went well, and what failed.

        Each is tried once: where they were all to blame themselves, the next real groups are the trial.
        """
        kept = self._kept.get(pool)
        while kept:
            group = kept.popleft()
            if group.domain in domains:
                rewards = domains[group.domain].rewards
                try:
                    ending = await carry_out(Scoring(group, rewards, 0), rewards, scorers)
                except NoWorker as error:
                    kept.append(group)  # which says nothing about the episode
                    return False, str(error)
                return isinstance(ending, Forward), "" if isinstance(ending, Forward) else ending.detail
        return True, ""
