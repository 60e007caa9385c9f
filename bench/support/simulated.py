"""A backend and an engine that take as long as large ones but compute with a tiny model, for
``bench.faults``.
"""

from __future__ import annotations

import asyncio
import os
import random
import time

from broker.contract import wire
from learner.backends.torch import TorchBackend
from rlearner_text.openai.token_events import TokenListener
from rollout.engines.base import GenerationOutput
from rollout.engines.hf.engine import HFEngine

STEP_S = float(os.environ.get("RL_SIMULATED_STEP_S", "3"))
TURN_S = float(os.environ.get("RL_SIMULATED_TURN_S", "1"))

FEW = 64  # token ids below this, which every model has


class SlowBackend(TorchBackend):
    """Every optimizer step takes STEP_S longer."""

    def step(self) -> dict[str, float]:
        time.sleep(STEP_S)
        return super().step()


class SlowEngine(HFEngine):
    """Every turn takes between half and one and a half times TURN_S longer."""

    async def generate(
        self, request: wire.GenerateRequest, tap: TokenListener | None = None
    ) -> GenerationOutput:
        await asyncio.sleep(TURN_S * random.uniform(0.5, 1.5))
        return await super().generate(request, tap)


class InstantEngine(HFEngine):
    """Answers at once with any tokens, as many as are asked for; the weights come and go as ever."""

    async def generate(
        self, request: wire.GenerateRequest, tap: TokenListener | None = None
    ) -> GenerationOutput:
        while self.policy_version < request.min_version:  # noqa: ASYNC110  the engine tells nobody
            await asyncio.sleep(0.01)
        room = self._config.section.max_context_tokens - len(request.token_ids.array())
        num_tokens = min(request.sampling.max_tokens, room)
        tokens = [random.randrange(FEW) for _ in range(num_tokens)]
        return GenerationOutput(
            tokens, [-1.0] * num_tokens, [(self.policy_version, num_tokens)], "length"
        )
