"""The hub's side of an environment in a worker process: the same methods, all asynchronous."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Final, Protocol, TypeVar

import msgspec

from broker.system.workers import line
from envhub.envs.base import Environment, Observation, Split, StepResult
from envhub.workers import protocol
from envhub.workers.calls import CallFailed
from rlearner_text.tool_calls import ToolCall

log = logging.getLogger(__name__)

# for an environment to close itself
FAREWELL_S: Final = 1.0

A = TypeVar("A")


class WorkerReaper(Protocol):
    """The part of ``envhub.workers.worker_pool.WorkerPool`` that is used here."""

    async def reap(self, environment: RemoteEnvironment, *, hung_up: bool) -> str: ...


class RemoteEnvironment(Environment):
    """An environment in a worker process.

    Attributes:
        pid: of its process.
        spent: whether it has used much of its memory and should not play another episode.
    """

    isolation = "process"

    def __init__(
        self, pool: WorkerReaper, args: Any, pid: int, connection: line.WorkerSocket
    ) -> None:
        super().__init__(args)
        self.pid = pid
        self.spent = False
        self._pool = pool
        self._line = connection
        self._is_healthy = True  # it has answered every request

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
        return Observation(first.text, first.anchor, first.history)

    async def step(self, text: str) -> StepResult:
        return self._stepped(
            await self._ask("step", protocol.StepEnvironment(text), protocol.StepOutcome)
        )

    async def use(self, calls: Sequence[ToolCall]) -> StepResult:
        request = protocol.UseTools([(call.name, call.arguments) for call in calls])
        return self._stepped(await self._ask("use", request, protocol.StepOutcome))

    def _stepped(self, outcome: protocol.StepOutcome) -> StepResult:
        self.spent = self.spent or outcome.spent
        observation = Observation(outcome.text, outcome.anchor)
        return StepResult(
            observation,
            outcome.reward,
            outcome.done,
            valid=outcome.valid,
            success=outcome.success,
            truncated=outcome.truncated,
            metrics=outcome.metrics,
        )

    async def text_frame(self) -> str:  # type: ignore[override]
        return (await self._ask("text_frame", protocol.RenderState(), protocol.RenderedState)).text

    async def close(self) -> None:  # type: ignore[override]
        """Close the environment if it is healthy, and end its process."""
        try:
            if self._is_healthy:
                async with asyncio.timeout(FAREWELL_S):
                    await self._ask("close", protocol.CloseEnvironment(), protocol.EnvironmentMade)
        except (CallFailed, TimeoutError) as error:
            log.debug("close: %s", error)
        finally:
            self._line.close()
            await self._pool.reap(self, hung_up=False)

    async def _ask(self, method: str, request: Any, answer: type[A]) -> A:
        self._is_healthy = False
        try:
            reply = protocol.ANSWERS.decode(await self._line.ask(protocol.ENCODER.encode(request)))
        except line.HungUp:
            cause = await self._pool.reap(self, hung_up=True)
            raise CallFailed(f"{method}: the worker process {cause}") from None
        except (line.ProtocolError, msgspec.DecodeError) as error:
            raise CallFailed(
                f"{method}: the worker process sent an invalid answer: {error}"
            ) from None
        if isinstance(reply, protocol.EnvironmentFailed):
            raise CallFailed(reply.detail, reply.trace)
        if not isinstance(reply, answer):
            raise CallFailed(f"{method}: the worker process answered {type(reply).__name__}")
        self._is_healthy = True
        return reply
