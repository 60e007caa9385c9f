"""The hub's side of an environment in a worker process: the same methods, all asynchronous."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Final, TypeVar

from envhub.envs.base import Environment, Observation, Split, StepResult
from envhub.workers import protocol
from envhub.workers.calls import CallFailed
from rlearner_text.tool_calls import ToolCall
from rlearner_workers.forked_workers import ForkedWorker
from rlearner_workers.link import InvalidMessage, LinkClosed

log = logging.getLogger(__name__)

# for an environment to close itself
FAREWELL_S: Final = 1.0

A = TypeVar("A")


class RemoteEnvironment(Environment):
    """An environment in a worker process.

    Attributes:
        pid: of its process.
        idle_since: monotonic seconds, when its last episode ended.
        spent: whether it has used much of its memory and should not play another episode.
    """

    isolation = "process"

    def __init__(self, args: Any, worker: ForkedWorker[protocol.Answer]) -> None:
        super().__init__(args)
        self.worker = worker
        self.pid = worker.pid
        self.spent = False
        self.idle_since = 0.0
        self._is_healthy = True  # it has answered every request, and well
        self._is_silent = False  # it has not answered the last one

    @property
    def is_reaped(self) -> bool:
        """Whether its process has ended, with that of another environment."""
        return self.pid not in self.worker.workers.living

    async def constructor(self) -> None:
        """Make the environment in the worker process."""
        await self._ask("constructor", protocol.MakeEnvironment(), protocol.EnvironmentMade)

    async def reset(self, task_index: int, split: Split, seed: int) -> Observation:
        first = await self._ask(
            "reset", protocol.ResetEnvironment(task_index, split, seed), protocol.FirstObservation
        )
        self.prompt = first.prompt
        self.reference = first.reference
        self.row = first.row
        return Observation(first.text, first.anchor, first.history, first.seat, first.actions)

    async def step(self, text: str) -> StepResult:
        return self._stepped(
            await self._ask("step", protocol.StepEnvironment(text), protocol.StepOutcome)
        )

    async def use(self, calls: Sequence[ToolCall]) -> StepResult:
        request = protocol.UseTools([(call.name, call.arguments) for call in calls])
        return self._stepped(await self._ask("use", request, protocol.StepOutcome))

    def _stepped(self, outcome: protocol.StepOutcome) -> StepResult:
        self.spent = self.spent or outcome.spent
        observation = Observation(
            outcome.text, outcome.anchor, seat=outcome.seat, actions=outcome.actions
        )
        return StepResult(
            observation,
            outcome.reward,
            outcome.done,
            valid=outcome.valid,
            success=outcome.success,
            truncated=outcome.truncated,
            metrics=outcome.metrics,
            seat_rewards=outcome.seat_rewards,
            seat_successes=outcome.seat_successes,
        )

    async def text_frame(self) -> str:  # type: ignore[override]
        return (await self._ask("text_frame", protocol.RenderState(), protocol.RenderedState)).text

    async def close(self) -> None:
        """Close the environment if it is healthy, and end its process."""
        try:
            if self._is_healthy:
                async with asyncio.timeout(FAREWELL_S):
                    await self._ask("close", protocol.CloseEnvironment(), protocol.EnvironmentMade)
        except (CallFailed, TimeoutError) as error:
            log.debug("close: %s", error)
        finally:
            await self.worker.close(is_lost=self._is_silent)

    async def _ask(self, method: str, request: Any, answer: type[A]) -> A:
        self._is_healthy = False
        self._is_silent = True
        try:
            reply = await self.worker.link.call(request)
            self._is_silent = False
        except LinkClosed:
            cause = await self.worker.reap()
            raise CallFailed(f"{method}: the worker process {cause}") from None
        except InvalidMessage as error:
            raise CallFailed(
                f"{method}: the worker process sent an invalid answer: {error}"
            ) from None
        if isinstance(reply, protocol.EnvironmentFailed):
            raise CallFailed(reply.detail, reply.trace)
        if not isinstance(reply, answer):
            raise CallFailed(f"{method}: the worker process answered {type(reply).__name__}")
        self._is_healthy = True
        return reply
