"""The process of a reward that scores many samples at once, such as a judge or a reward model.

Started by ``rewardhub.reward_processes``. Requests have numbers; answers come in any order.
"""

from __future__ import annotations

import asyncio
import inspect
import socket
import sys
from typing import Any

from broker.errors import RlearnerError
from broker.system.workers import fault, limits, line
from rewardhub import protocol
from rewardhub.rewards import loading
from rewardhub.rewards.base import NoScore, ResponseFault, Score, check_scored, score_of_fault


class RewardHost:
    """Server of one reward for its hub."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._score: Score | None = None

    async def serve(self) -> None:
        """Answer requests until the hub closes the connection."""
        while (data := await _read_frame(self._reader)) is not None:
            message = protocol.decode_numbered_request(data)
            if isinstance(message, protocol.CancelScoreRequest):
                if (task := self._tasks.get(message.number)) is not None:
                    task.cancel()
            else:
                self._tasks[message.number] = asyncio.create_task(self._work(message))

    async def _work(self, numbered: protocol.NumberedRequest) -> None:
        try:
            answer = await self._answer(numbered.content)
            self._writer.write(
                line.frame(protocol.encode_message(protocol.NumberedReply(numbered.number, answer)))
            )
            await self._writer.drain()
        finally:
            del self._tasks[numbered.number]

    async def _answer(
        self, request: protocol.LoadRewardRequest | protocol.ScoreRequest
    ) -> protocol.ScoreReply | protocol.ScoreFailureReply:
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
            return protocol.ScoreFailureReply(line.clean(f"{request.name}: {error}"), retry=False)
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


async def _read_frame(reader: asyncio.StreamReader) -> bytes | None:
    try:
        (size,) = line.HEADER.unpack(await reader.readexactly(line.HEADER.size))
        return await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


async def main(number: int) -> None:
    """Serve on the socket with this file descriptor."""
    limits.be_expendable()
    await RewardHost(*await asyncio.open_unix_connection(sock=socket.socket(fileno=number))).serve()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
