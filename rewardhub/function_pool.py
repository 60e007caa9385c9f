"""Scores samples with Python functions of this process, one at a time, in a thread."""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from broker.settings.config import RewardConfig
from rewardhub.rewards.base import (
    ResponseFault,
    Sample,
    Score,
    Scored,
    check_scored,
    score_of_fault,
)
from rewardhub.rewards.caller import PREFIX


@dataclass(frozen=True)
class _FunctionCall:
    score: Score
    sample: Sample
    outcome: Future[Scored | BaseException]


class FunctionPool:
    """The functions, with the interface of a ``RewardWorkerPool``.

    The first failure of a function ends the hub: its groups are not at fault, and go back.

    Args:
        functions: by the name of their rewards.
        timeout_s: for one score.
        report_failure: called once in the hub's event loop, with the name and the error.
    """

    num_killed = 0

    def __init__(
        self,
        functions: Mapping[str, Score],
        timeout_s: float,
        report_failure: Callable[[str, BaseException], None],
    ) -> None:
        self._functions = functions
        self._timeout_s = timeout_s
        self._report_failure = report_failure
        self._turn = asyncio.Lock()
        # The thread ends with the process, even if a function never returns.
        self._calls: queue.SimpleQueue[_FunctionCall | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="reward-functions", daemon=True)
        self._is_failed = False
        self.num_busy = 0

    @property
    def num_free(self) -> int:
        """How many more samples would be scored at once."""
        return 0 if self.num_busy or self._is_failed else 1

    def adopt(self, rewards: Sequence[RewardConfig]) -> None:
        """Keep the functions: they are those of this process."""

    async def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    async def score(self, reward: RewardConfig, sample: Sample) -> Scored:
        """Return the reward of one sample; wait for the hub's end once a function has failed."""
        self.num_busy += 1
        try:
            async with self._turn:
                outcome = await self._call(reward, sample)
            if isinstance(outcome, Scored):
                return outcome
            return await asyncio.Future()
        finally:
            self.num_busy -= 1

    async def _call(self, reward: RewardConfig, sample: Sample) -> Scored | BaseException | None:
        if self._is_failed:
            return None
        name = reward.name.removeprefix(PREFIX)
        call = _FunctionCall(self._functions[name], sample, Future())
        self._calls.put(call)
        outcome: Scored | BaseException
        try:
            outcome = await asyncio.wait_for(asyncio.wrap_future(call.outcome), self._timeout_s)
        except TimeoutError:
            text = f"no score within {self._timeout_s:g} s (rewardhub.timeout_s)"
            outcome = TimeoutError(text)
        if isinstance(outcome, BaseException):
            self._is_failed = True
            self._report_failure(name, outcome)
        return outcome

    async def close(self) -> None:
        """End the thread after the call in progress."""
        self._calls.put(None)

    def cpu_s(self) -> float:
        """Return 0: the functions' processor time is this process's."""
        return 0.0

    def _work(self) -> None:
        # One loop for all calls, so that a coroutine's clients stay usable.
        with asyncio.Runner() as runner:
            while (call := self._calls.get()) is not None:
                # A result, because an asyncio future takes no StopIteration as its error.
                if call.outcome.set_running_or_notify_cancel():
                    call.outcome.set_result(_run_call(call, runner))


def _run_call(call: _FunctionCall, runner: asyncio.Runner) -> Scored | BaseException:
    try:
        value = call.score(call.sample)
        if inspect.isawaitable(value):
            value = runner.run(_await_value(value))
        return check_scored(value, call.sample.num_turns)
    except ResponseFault as response:
        return score_of_fault(response, call.sample.num_turns)
    except BaseException as error:  # noqa: BLE001 - user code may raise anything
        return error


async def _await_value(value: Awaitable[object]) -> object:
    return await value
