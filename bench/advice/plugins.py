"""An engine, an environment and a reward that only take time, for real processes."""

from __future__ import annotations

import asyncio
import json
import os
import time
from functools import cache
from typing import Any, Final

from bench.advice.paced import PacedQueue
from bench.advice.speeds import FleetSpeeds
from broker.contract import wire
from broker.settings.config import Section
from envhub.envs.base import Environment, Observation, Split, StepResult
from envhub.servers.turn import mix
from rollout.engines.base import EngineConfig, EngineStats, GenerationOutput
from rollout.engines.weightless import WeightlessEngine

SPEEDS: Final = "RL_ADVICE_SPEEDS"  # variable with a FleetSpeeds as JSON
TOKEN: Final = 40  # any that every model has


@cache
def speeds() -> FleetSpeeds:
    """Return the speeds of this process's fleet."""
    return FleetSpeeds(**json.loads(os.environ[SPEEDS]))


class PacedEngine(WeightlessEngine):
    """Answers with as many tokens as the speeds say, at their pace, and says that they are of the
    required version.
    """

    name = "paced"

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._queue = PacedQueue(speeds().slots, speeds().token_s, speeds().token_each_s)

    async def start(self) -> None:
        pass

    async def generate(self, request: wire.GenerateRequest) -> GenerationOutput:
        assert request.sampling.seed is not None
        num_tokens = min(speeds().tokens(request.sampling.seed), request.sampling.max_tokens)
        await self._queue.serve(num_tokens)
        tokens = [TOKEN] * num_tokens
        logprobs = [-1.0] * num_tokens
        return self._count(
            GenerationOutput(tokens, logprobs, [(request.min_version, num_tokens)], "stop")
        )

    def abort(self, request_id: str) -> None:
        """Let it run out: nobody reads it."""

    def stats(self) -> EngineStats:
        tokens, busy_s = self._queue.counts()
        return EngineStats(self._queue.running, self._queue.waiting, speeds().slots, busy_s, tokens)

    async def close(self) -> None:
        self._closed.set()


class SlowEnvironment(Environment):
    """A conversation of as many turns as the speeds say."""

    Args = Section
    isolation = "none"

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self._seed = self._turn = 0

    def reset(self, task_index: int, split: Split, seed: int) -> Observation:
        self._seed = seed
        self._turn = 0
        return Observation("go")

    async def step(self, text: str) -> StepResult:
        self._turn += 1
        await asyncio.sleep(speeds().env_step(mix(self._seed, id(self), self._turn)))
        done = self._turn >= speeds().turns
        return StepResult(Observation("on"), float(self._seed % 3), done)


def score(sample: Any) -> float:
    """Return a number that depends on the sample, after a while."""
    time.sleep(speeds().score_s)
    return float(sample.num_tokens % 5)
