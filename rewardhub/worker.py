"""A worker process that scores one sample at a time; ``rewardhub.worker_pool`` starts it."""

from __future__ import annotations

import asyncio
import inspect
import json
import socket
import sys
from collections.abc import Awaitable
from contextlib import closing

import msgspec

from broker.errors import ConfigError
from broker.system import fault
from rewardhub import protocol
from rewardhub.rewards import loading
from rewardhub.rewards.base import (
    NoScore,
    ResponseFault,
    Sample,
    Score,
    Scored,
    check_scored,
    score_of_fault,
)
from rlearner_workers import limits
from rlearner_workers.calls import serve_calls


class RewardWorker:
    """The rewards of one process, loaded at their first use."""

    def __init__(self, memory_mib: int | None = None) -> None:
        self._memory_mib = memory_mib
        # counts from the first score; what rewards load before is free
        self._allowance: limits.ResourceLimits | None = None
        self._is_exhausted = False  # the last score ran out of memory
        self._rewards: dict[str, Score] = {}
        # one loop for all calls, so that a coroutine's clients stay usable
        self._loop = asyncio.Runner()

    def close(self) -> None:
        self._loop.close()

    def answer(self, request: protocol.RewardRequest) -> protocol.RewardReply:
        """Handle a request; any failure of a reward becomes an answer."""
        try:
            reward = self._reward(request.name, request.args)
            if isinstance(request, protocol.LoadRewardRequest):
                return protocol.ScoreReply(None)
            self._allowance = self._allowance or limits.ResourceLimits(self._memory_mib)
            scored = self._score(reward, request.sample)
            return protocol.ScoreReply(scored.value, scored.notes)
        except ConfigError as error:
            return protocol.ScoreFailureReply(fault.clean(str(error)), retry=False)
        except NoScore as error:
            return protocol.ScoreFailureReply(fault.clean(f"{request.name}: {error}"), retry=False)
        except BaseException as error:  # noqa: BLE001 - user code may raise anything
            self._is_exhausted = isinstance(error, MemoryError)
            detail = f"{request.name}: {fault.told(error)}"
            return protocol.ScoreFailureReply(detail, retry=True, trace=fault.trace(error))

    def answer_call(self, content: msgspec.Raw) -> tuple[protocol.RewardReply, bool]:
        """Return the answer to a call, and whether this process should be replaced."""
        try:
            reply = self.answer(protocol.REQUESTS.decode(content))
        except msgspec.DecodeError as error:
            detail = f"the hub's request cannot be decoded: {error}"
            reply = protocol.ScoreFailureReply(detail, retry=True)
        # Measuring may fail where memory is exhausted.
        if self._is_exhausted or self._allowance is None:
            return reply, self._is_exhausted
        return reply, self._allowance.spent()

    def _reward(self, name: str, args: dict[str, object]) -> Score:
        key = json.dumps([name, args], sort_keys=True)
        if key not in self._rewards:
            self._rewards[key] = loading.load(name, args)
        return self._rewards[key]

    def _score(self, reward: Score, sample: Sample) -> Scored:
        try:
            value = reward(sample)
            if inspect.isawaitable(value):
                value = self._loop.run(_await_value(value))
        except ResponseFault as response:
            return score_of_fault(response, sample.num_turns)
        return check_scored(value, sample.num_turns)


async def _await_value(value: Awaitable[object]) -> object:
    return await value


def serve(connection: socket.socket, memory_mib: int | None) -> None:
    """Answer requests until the hub closes the connection."""
    limits.be_expendable()
    with connection, closing(RewardWorker(memory_mib)) as worker:
        serve_calls(connection, worker.answer_call)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]) or None)
