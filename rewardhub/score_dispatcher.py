"""Combines a hub's workers, one sample at a time, with processes that take many."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence

from broker.runtime.load_curve import LoadCurve
from broker.settings.config import RewardConfig
from rewardhub.function_pool import FunctionPool
from rewardhub.reward_processes import RewardProcesses, kind_key
from rewardhub.rewards import loading
from rewardhub.rewards.base import Sample, Scored
from rewardhub.worker_pool import RewardWorkerPool


class ScoreDispatcher:
    """All processes that score for a hub.

    Args:
        rewards: the hub's rewards by configuration key.
        num_workers: processes for rewards that take one sample at a time.
        timeout_s: for one score of such a process.
        memory_mib: memory of such a process.
        gpu_numbers: GPUs for reward models.
        passed: environment variables that the processes get, secret ones too.
        functions: replace the processes for rewards that take one sample at a time.

    Attributes:
        at_once: samples that can be scored at once.
        curve: how long a score takes at which load.
    """

    def __init__(
        self,
        rewards: Mapping[str, RewardConfig],
        *,
        num_workers: int,
        timeout_s: float,
        memory_mib: int | None,
        gpu_numbers: Sequence[int],
        passed: Sequence[str] = (),
        functions: FunctionPool | None = None,
    ) -> None:
        self._num_workers = 1 if functions else num_workers
        self._adopt(rewards)
        self.curve = LoadCurve(lambda: self.at_once)
        self._workers = functions or RewardWorkerPool(
            num_workers, timeout_s, self._single, memory_mib=memory_mib, passed=passed
        )
        self._hosts = RewardProcesses(gpu_numbers, passed)

    def adopt(self, rewards: Mapping[str, RewardConfig]) -> None:
        """Use these rewards from now on; new processes start with the first sample."""
        self._adopt(rewards)
        self._workers.adopt(self._single)

    def _adopt(self, rewards: Mapping[str, RewardConfig]) -> None:
        self._many, self._single = _divide_notes(rewards)
        many = (loading.concurrency_of(reward) for reward in self._many.values())
        self.at_once = self._num_workers * bool(self._single) + sum(
            reward.at_once for reward in many if reward is not None
        )

    async def start(self) -> None:
        """Start the processes that the rewards need; judges alone need no workers.

        Raises:
            UserError: if a reward cannot be loaded here, or no process can be started.
        """
        if self._single:
            await self._workers.start()
        await self._hosts.start(self._many)

    async def score(self, reward: RewardConfig, sample: Sample) -> Scored:
        """Return the reward of one sample.

        Raises:
            ScoreError: if there is none.
            NoWorkerError: if no process can be started here now.
        """
        many = loading.concurrency_of(reward) is not None
        piece = self.curve.enter(time.monotonic())
        is_scored = False
        try:
            scored = await (
                self._hosts.score(reward, sample) if many else self._workers.score(reward, sample)
            )
            is_scored = True
            return scored
        finally:
            self.curve.leave(piece, time.monotonic(), float(is_scored))

    def has_room(
        self, rewards: Sequence[RewardConfig], promised: Sequence[RewardConfig] = ()
    ) -> bool:
        """Return whether one sample would be scored by these rewards at once.

        Args:
            promised: rewards that are about to be asked for a score, once for each score.
        """
        needed = Counter(map(_sample_place, [*promised, *rewards]))
        return all(
            needed[place] <= (self._hosts.num_free(reward) if place else self._workers.num_free)
            for reward, place in zip(rewards, map(_sample_place, rewards), strict=True)
        )

    async def close(self) -> None:
        await self._workers.close()
        await self._hosts.close()

    def cpu_s(self) -> float:
        """Return the CPU seconds of all processes so far."""
        return self._workers.cpu_s() + self._hosts.cpu_s()

    @property
    def num_busy(self) -> int:
        """Samples that are being scored."""
        return self._workers.num_busy + self._hosts.num_busy

    @property
    def num_killed(self) -> int:
        """Processes that ended too early."""
        return self._workers.num_killed + self._hosts.num_killed


def _sample_place(reward: RewardConfig) -> str:
    """Return the key of the processes that batch this reward; empty: any worker."""
    return "" if loading.concurrency_of(reward) is None else kind_key(reward)


def _divide_notes(
    rewards: Mapping[str, RewardConfig],
) -> tuple[dict[str, RewardConfig], list[RewardConfig]]:
    """Return the rewards that take many samples at once, by key, and the others."""
    many = {
        key: reward for key, reward in rewards.items() if loading.concurrency_of(reward) is not None
    }
    return many, [reward for key, reward in rewards.items() if key not in many]
