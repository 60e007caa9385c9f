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

FAREWELL_S: Final = 1.0  # for an environment to close itself

A = TypeVar("A")


class WorkerReaper(Protocol):
    """The part of ``envhub.workers.worker_pool.WorkerPool`` that is used here."""

    async def bury(self, environment: RemoteEnvironment, *, hung_up: bool) -> str: ...


class RemoteEnvironment(Environment):
    """An environment in a worker process.

    Attributes:
        pid: of its process.
        spent: whether it has used much of its memory and should not play another episode.
    """

    isolation = "process"

    def __init__(
        self, nursery: WorkerReaper, args: Any, pid: int, speech: line.WorkerSocket
    ) -> None:
        super().__init__(args)
        self.pid = pid
        self.spent = False
        self._nursery = nursery
        self._line = speech
        self._sound = True  # it has answered every request

    async def constructor(self) -> None:
        """Make the environment in the worker process."""
        await self._ask("constructor", protocol.MakeEnvironment(), protocol.EnvironmentMade)

    async def reset(self, task_index: int, split: Split, seed: int) -> Observation:
        observation = await self._ask(
            "reset", protocol.ResetEnvironment(task_index, split, seed), protocol.FirstObservation
        )
        self.prompt = observation.prompt
        self.reference = observation.reference
        return Observation(observation.text, observation.anchor)

    async def step(self, text: str) -> StepResult:
        return self._stepped(
            await self._ask("step", protocol.StepEnvironment(text), protocol.StepOutcome)
        )

    async def use(self, calls: Sequence[ToolCall]) -> StepResult:
        question = protocol.UseTools([(call.name, call.arguments) for call in calls])
        return self._stepped(await self._ask("use", question, protocol.StepOutcome))

    def _stepped(self, done: protocol.StepOutcome) -> StepResult:
        self.spent = self.spent or done.spent
        observation = Observation(done.text, done.anchor)
        return StepResult(
            observation,
            done.reward,
            done.done,
            done.valid,
            done.success,
            done.truncated,
            done.metrics,
        )

    async def text_frame(self) -> str:  # type: ignore[override]
        return (await self._ask("text_frame", protocol.RenderState(), protocol.RenderedState)).text

    async def close(self) -> None:  # type: ignore[override]
        """Close the environment if it is healthy, and end its process."""
        try:
            if self._sound:
                async with asyncio.timeout(FAREWELL_S):
                    await self._ask("close", protocol.CloseEnvironment(), protocol.EnvironmentMade)
        except (CallFailed, TimeoutError) as error:
            log.debug("close: %s", error)
        finally:
            self._line.close()
            await self._nursery.bury(self, hung_up=False)

    async def _ask(self, method: str, question: Any, answer: type[A]) -> A:
        self._sound = False
        try:
            found = protocol.ANSWERS.decode(await self._line.ask(protocol.ENCODER.encode(question)))
        except line.HungUp:
            cause = await self._nursery.bury(self, hung_up=True)
            raise CallFailed(f"{method}: the worker process {cause}") from None
        except (line.ProtocolError, msgspec.DecodeError) as error:
            raise CallFailed(
                f"{method}: the worker process sent an invalid answer: {error}"
            ) from None
        if isinstance(found, protocol.EnvironmentFailed):
            raise CallFailed(found.detail, found.trace)
        if not isinstance(found, answer):
            raise CallFailed(f"{method}: the worker process answered {type(found).__name__}")
        self._sound = True
        return found
