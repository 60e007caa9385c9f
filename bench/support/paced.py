"""A backend and an engine that take a given time for a step, for ``bench.overlap``; weights travel
as ever.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Sequence
from typing import Any, Final

import torch

from broker.contract import wire
from learner.algorithm.samples import TrainSample
from learner.backends.torch import TorchBackend
from rlearner_text.openai.token_events import TokenListener
from rollout.engines.base import GenerationOutput
from rollout.engines.hf.engine import HFEngine

TRAIN_S: Final = float(os.environ.get("RL_PACED_TRAIN_S", "1"))  # for all samples of a step
GENERATE_S: Final = float(os.environ.get("RL_PACED_GENERATE_S", "1"))
SAMPLES: Final = int(os.environ.get("RL_PACED_SAMPLES", "64"))  # of a step
SLOTS: Final = int(os.environ.get("RL_PACED_SLOTS", "32"))  # of the engine
OPTIMIZER_SHARE: Final = 0.1  # of a step's time
JITTER: Final = 0.5  # an answer takes this much more or less of the mean
FEW: Final = 64  # token ids below this, which every model has


class PacedBackend(TorchBackend):
    """Sleeps for each sample and for the optimizer, and changes every weight a little at each step."""

    def forward_backward(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        time.sleep(TRAIN_S * (1 - OPTIMIZER_SHARE) * len(samples) / SAMPLES)
        return {}

    @torch.no_grad()
    def step(self) -> dict[str, float]:
        time.sleep(TRAIN_S * OPTIMIZER_SHARE)
        for weight in self.policy.module.parameters():
            weight.add_(1e-4)
        return {"actor/lr": 0.0}


class PacedEngine(HFEngine):
    """Answers with any tokens; ``SLOTS`` answers at a time, so that the samples of a step take
    ``GENERATE_S``.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._slots = asyncio.Semaphore(SLOTS)
        # share by which the answer before was longer, if the next is to make up for it
        self._longer = 0.0

    async def generate(
        self, request: wire.GenerateRequest, tap: TokenListener | None = None
    ) -> GenerationOutput:
        async with self._slots:
            while self.policy_version < request.min_version:  # noqa: ASYNC110  the engine tells nobody
                await asyncio.sleep(0.005)
            longer = -self._longer or random.uniform(-JITTER, JITTER)
            self._longer = 0.0 if self._longer else longer
            await asyncio.sleep(GENERATE_S * SLOTS / SAMPLES * (1 + longer))
            room = self._config.section.max_context_tokens - len(request.token_ids.array())
            num_tokens = min(request.sampling.max_tokens, room)
            tokens = [random.randrange(FEW) for _ in range(num_tokens)]
            return GenerationOutput(
                tokens, [-1.0] * num_tokens, [(self.policy_version, num_tokens)], "length"
            )
