"""Play groups of episodes without a fleet: the hub's episodes and the Hugging Face engine's core on
one thread.

The episodes are those of ``envhub``, with its conversations, masks, versions and logprobs; the
engine is the server's, without its thread. Between two passes of the model every waiting episode
makes its move, to fill the passes.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from broker.contract import wire
from broker.settings.run_settings import RunSettings
from envhub.domain import load_domains
from envhub.episodes.runners import EpisodeLimits, EpisodeRunners
from envhub.servers.turn import SampledTurn, TurnFailed, TurnRequest
from envhub.task import EpisodeResult
from envhub.tickets import assignment
from envhub.tickets.assignment import TicketAssignment
from envhub.workers.calls import EnvironmentCalls
from rlearner_text.tokenizer import Tokenizer
from rollout.engines.base import EngineConfig, GenerationOutput
from rollout.engines.hf.engine_core import EngineCore

PATIENCE_S = 3600.0  # nothing here waits for a network


class InlineHub:
    """Plays all tickets at once to their end, beginning with version 0 at ``model_path``."""

    def __init__(self, config: dict[str, Any], model_path: str) -> None:
        settings = RunSettings.of_config(config)
        self._core = EngineCore(
            EngineConfig(model_path, settings.rollout, device="cpu", policy_version=0)
        )
        self._domains = load_domains(settings)
        self._players = EpisodeRunners(
            Tokenizer.load(model_path),
            self,
            EnvironmentCalls(PATIENCE_S),
            EpisodeLimits(PATIENCE_S, PATIENCE_S),
        )
        self._waiting: dict[str, asyncio.Future[GenerationOutput]] = {}
        self._numbers = itertools.count(1)

    @property
    def version(self) -> int:
        return self._core.version

    def update(self, weights: Mapping[str, torch.Tensor], version: int, probe: wire.Probe) -> None:
        """Take new weights between two calls of ``play``; raise TransferFailed if engine and
        trainer disagree.
        """
        self._core.update(weights, version, "recompute", probe)

    async def play(self, asked: Sequence[TicketAssignment]) -> list[wire.Group]:
        """Play one group per ticket, in order; raise EpisodeFailed without retrying if one fails."""
        # an episode keeps its slot, and with it its KV, to its end
        gate = asyncio.Semaphore(self._core.model.max_running)
        groups = asyncio.gather(*(self._group(one, gate) for one in asked))
        while not groups.done():
            await asyncio.sleep(0)  # outputs wake their episodes …
            await asyncio.sleep(0)  # … and those that ended let others begin
            self._pass()
        return groups.result()

    async def turn(self, ask: TurnRequest) -> SampledTurn:
        """Generate one turn as ``envhub.servers.generate.TurnGenerator`` does over a network."""
        request = wire.GenerateRequest(
            request_id=str(next(self._numbers)),
            conversation_id=ask.conversation_id,
            token_ids=wire.column(ask.token_ids, "<i4"),
            sampling=ask.sampling,
            min_version=ask.min_version,
            deadline_s=ask.timeout_s,
            expected_tokens=ask.expected_tokens,
            expected_high=ask.expected_high,
            priority=ask.priority,
            step=ask.step,
        )
        future = self._waiting[request.request_id] = asyncio.get_running_loop().create_future()
        self._core.submit(request, time.monotonic())
        output = await future
        if output.finish_reason not in ("stop", "length"):
            raise TurnFailed(f"{output.finish_reason} {output.error}")
        runs = [number for run in output.version_runs for number in run]
        return SampledTurn.of(
            output.token_ids, output.logprobs, runs, output.finish_reason, "engine"
        )

    def forget(self, episode: str) -> None:
        """Do nothing: this hub knows nothing of an episode between its turns."""

    def _pass(self) -> None:
        self._core.admit(time.monotonic())
        if self._core.can_step:
            self._core.step()
        for request_id, output in self._core.outbox:
            self._waiting.pop(request_id).set_result(output)
        self._core.outbox.clear()

    async def _group(self, asked: TicketAssignment, gate: asyncio.Semaphore) -> wire.Group:
        played = await asyncio.gather(
            *(self._episode(asked, episode, gate) for episode in range(asked.group_size))
        )
        temperature = self._domains[asked.domain].section.sampling.temperature
        return assignment.group(
            asked, played, pools=[], hub="bench", deliveries=1, temperature=temperature
        )

    async def _episode(
        self, asked: TicketAssignment, episode: int, gate: asyncio.Semaphore
    ) -> EpisodeResult:
        task = assignment.task(
            asked, self._domains[asked.domain], episode, f"{asked.key}.{episode}"
        )
        async with gate:
            return await self._players.play(task, lambda oldest_version: None)
