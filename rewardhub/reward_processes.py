"""The hub's processes for rewards that score many samples at once: one per reward, or per GPU."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Final

from broker.errors import UserError
from broker.settings.config import RewardConfig
from rewardhub.rewards import loading
from rewardhub.rewards.base import Sample, Scored
from rewardhub.worker_pool import NoWorkerError, RewardPool

log = logging.getLogger(__name__)

LOAD_S: Final = 900.0  # to load a reward model, on its process's own clock
GRACE_S: Final = 5.0  # after a reward's own timeout, if it does not keep it


class BatchedRewardPool(RewardPool):
    """The processes of one reward, each of which scores many samples at once."""

    def __init__(self, reward: RewardConfig, gpus: Sequence[int], passed: Sequence[str]) -> None:
        concurrency = loading.concurrency_of(reward)
        assert concurrency is not None, f"{reward.name} scores one sample at a time"
        envs: list[Mapping[str, str]] = [{}]
        if concurrency.on_gpu and gpus:
            order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
            envs = [{**order, "CUDA_VISIBLE_DEVICES": str(gpu)} for gpu in gpus]
        super().__init__(
            "rewardhub.reward_process",
            [reward],
            timeout_s=concurrency.timeout_s + GRACE_S,
            start_s=LOAD_S,
            passed=passed,
            envs=envs,
            calls_at_once=concurrency.at_once,
        )
        self._name = reward.name

    def report_loss(self, cause: str) -> None:
        log.warning("%s: its process %s; the next sample starts another", self._name, cause)


class RewardProcesses:
    """The processes of all such rewards of a hub.

    Args:
        gpus: GPUs to use, one process of each model on each; empty: what the environment allows.
        passed: environment variables that they get besides the harmless ones and those that their
            rewards refer to.
    """

    def __init__(self, gpus: Sequence[int] = (), passed: Sequence[str] = ()) -> None:
        self._gpus = list(gpus)
        self._passed = passed
        self.pools: dict[str, BatchedRewardPool] = {}

    async def start(self, rewards: Mapping[str, RewardConfig]) -> None:
        """Start all processes of these rewards, given by their configuration keys.

        Raises:
            UserError: if a reward cannot be loaded here; names its key.
        """
        for key, reward in rewards.items():
            for error in await self._pool(reward).start_workers(LOAD_S):
                if isinstance(error, NoWorkerError):
                    raise UserError(f"{key}: {error}")
                raise error

    async def score(self, reward: RewardConfig, sample: Sample) -> Scored:
        """Return the reward of one sample, as ``RewardPool.score``."""
        return await self._pool(reward).score(reward, sample)

    def num_free(self, reward: RewardConfig) -> int:
        """Return how many more samples would be scored at once; negative: as many wait."""
        return self._pool(reward).num_free

    @property
    def num_busy(self) -> int:
        """Samples that are being scored."""
        return sum(pool.num_busy for pool in self.pools.values())

    @property
    def num_killed(self) -> int:
        """Processes that ended too early."""
        return sum(pool.num_killed for pool in self.pools.values())

    async def close(self) -> None:
        """Kill all of them."""
        await asyncio.gather(*(pool.close() for pool in self.pools.values()))

    def cpu_s(self) -> float:
        """Return the CPU seconds of all of them so far."""
        return sum(pool.cpu_s() for pool in self.pools.values())

    def _pool(self, reward: RewardConfig) -> BatchedRewardPool:
        key = kind_key(reward)
        if key not in self.pools:
            self.pools[key] = BatchedRewardPool(reward, self._gpus, self._passed)
        return self.pools[key]


def kind_key(reward: RewardConfig) -> str:
    """Return the key of the processes for this reward; equal for equal names and arguments."""
    return json.dumps([reward.name, reward.args], sort_keys=True)
