"""Runs one environment in a worker process, forked by the forkserver, until the hub hangs up."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable
from typing import Any, Final

from broker.system import fault
from broker.system.fault import trace
from envhub.domain import Domain
from envhub.envs.base import Environment
from envhub.workers import protocol, returned
from envhub.workers.calls import raised
from rlearner_text.tool_calls import ToolCall
from rlearner_workers.frames import read_frame, write_frame
from rlearner_workers.limits import ResourceLimits

_METHODS: Final[dict[type, str]] = {  # what a request calls, for error messages
    protocol.MakeEnvironment: "constructor",
    protocol.ResetEnvironment: "reset",
    protocol.StepEnvironment: "step",
    protocol.UseTools: "use",
    protocol.RenderState: "text_frame",
    protocol.CloseEnvironment: "close",
}


class EnvironmentWorker:
    """Runs one environment's methods, plain or asynchronous."""

    def __init__(self, domain: Domain, allowance: ResourceLimits) -> None:
        self._domain = domain
        self._allowance = allowance
        self._environment: Environment | None = None
        self._loop = asyncio.Runner()  # one loop for all episodes, made when first needed

    def answer(self, request: Any) -> Any:
        """Answer a request of the hub; errors of the environment are answers too."""
        method = _METHODS[type(request)]
        try:
            match request:
                case protocol.MakeEnvironment():
                    self._environment = self._domain.make()
                    return protocol.EnvironmentMade()
                case protocol.ResetEnvironment(task_index, split, seed):
                    return self._reset(task_index, split, seed)
                case protocol.StepEnvironment(text):
                    return self._step("step", text)
                case protocol.UseTools(calls):
                    return self._step("use", [ToolCall(*call) for call in calls])
                case protocol.RenderState():
                    return protocol.RenderedState(
                        returned.text("text_frame returned what", self._call("text_frame"))
                    )
                case protocol.CloseEnvironment():
                    self._call("close")
                    return protocol.EnvironmentMade()
        except returned.ReturnedValueError as error:
            return protocol.EnvironmentFailed(fault.clean(str(error)))
        except BaseException as error:  # noqa: BLE001 - the user's code may raise anything
            return protocol.EnvironmentFailed(raised(method, error), trace(error))

    def _call(self, method: str, *args: Any) -> Any:
        result = getattr(self._environment, method)(*args)
        if not hasattr(result, "__await__"):
            return result
        return self._loop.run(_await_work(result))

    def _reset(self, task_index: int, split: str, seed: int) -> protocol.FirstObservation:
        observation = returned.observation("reset", self._call("reset", task_index, split, seed))
        assert self._environment is not None
        prompt = returned.text("after reset, prompt", self._environment.prompt)
        reference = returned.text("after reset, reference", self._environment.reference)
        row = returned.row("after reset, row", self._environment.row)
        return protocol.FirstObservation(
            text=observation.text,
            anchor=observation.anchor,
            prompt=prompt,
            reference=reference,
            row=row,
            history=observation.history,
            seat=observation.seat,
            actions=observation.actions,
        )

    def _step(self, method: str, action: Any) -> protocol.StepOutcome:
        step = returned.step_result(self._call(method, action), method)
        observation = step.observation
        is_spent = step.done and self._allowance.spent()
        return protocol.StepOutcome(
            observation.text,
            observation.anchor,
            step.reward,
            done=step.done,
            valid=step.valid,
            success=step.success,
            truncated=step.truncated,
            metrics=step.metrics,
            spent=is_spent,
            seat=observation.seat,
            actions=observation.actions,
            seat_rewards=step.seat_rewards,
            seat_successes=step.seat_successes,
        )


async def _await_work(work: Awaitable[Any]) -> Any:
    return await work


def serve(domain: Domain, connection: socket.socket, allowance: ResourceLimits) -> None:
    """Answer requests until the hub closes the connection."""
    worker = EnvironmentWorker(domain, allowance)
    with connection:
        while (data := read_frame(connection.fileno())) is not None:
            answer = worker.answer(protocol.REQUESTS.decode(data))
            if not write_frame(connection.fileno(), protocol.ENCODER.encode(answer)):
                return
