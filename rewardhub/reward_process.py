"""The process of a reward that scores many samples at once, such as a judge or a reward model.

Started by ``rewardhub.reward_processes``. Answers come in any order.
"""

from __future__ import annotations

import asyncio
import inspect
import socket
import sys
from typing import Any

import msgspec

from broker.errors import RlearnerError
from broker.system import fault
from rewardhub import protocol
from rewardhub.rewards import loading
from rewardhub.rewards.base import NoScore, ResponseFault, Score, check_scored, score_of_fault
from rlearner_workers import limits
from rlearner_workers.calls import serve_concurrent_calls


class RewardHost:
    """One reward, for its hub."""

    def __init__(self) -> None:
        self._score: Score | None = None

    async def answer(self, content: msgspec.Raw) -> protocol.RewardReply:
        """Answer a request; any failure of the reward is an answer, too."""
        request = protocol.REQUESTS.decode(content)
        try:
            if isinstance(request, protocol.LoadRewardRequest):
                await self._load(request)
                return protocol.ScoreReply(None)
            assert self._score is not None, "asked before it was loaded"
            num_turns = request.sample.num_turns
            try:
                value = self._score(request.sample)
                value = await value if inspect.isawaitable(value) else value
                scored = check_scored(value, num_turns)
            except ResponseFault as response:
                scored = score_of_fault(response, num_turns)
            return protocol.ScoreReply(scored.value, notes=scored.notes)
        except (RlearnerError, NoScore) as error:
            return protocol.ScoreFailureReply(fault.clean(f"{request.name}: {error}"), retry=False)
        except Exception as error:  # noqa: BLE001 - an error of a library must not end other scores
            return protocol.ScoreFailureReply(
                f"{request.name}: {fault.told(error)}", retry=True, trace=fault.trace(error)
            )

    async def _load(self, request: protocol.LoadRewardRequest) -> None:
        # loading a model takes long
        self._score = await asyncio.to_thread(loading.load, request.name, request.args)
        start: Any = getattr(getattr(self._score, "__self__", None), "start", None)
        if start is not None:
            await start()


async def main(number: int) -> None:
    """Serve on the socket with this file descriptor."""
    limits.be_expendable()
    await serve_concurrent_calls(socket.socket(fileno=number), RewardHost().answer)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
