"""A worker process: scores one sample after another until its hub hangs up. Started by ``rewardhub.workers``, not by hand."""

from __future__ import annotations

import asyncio
import inspect
import json
import socket
import sys
from collections.abc import Awaitable
from contextlib import closing
from io import BufferedReader

import msgspec

from broker.errors import ConfigError
from rewardhub import protocol
from rewardhub.rewards import function
from rewardhub.rewards.base import InvalidValue, Sample, Value, check_value


class Worker:
    """The rewards of one process, made when first asked for."""

    def __init__(self) -> None:
        self._rewards: dict[str, function.Score] = {}
        self._loop = asyncio.Runner()  # one loop for its whole life, so that a coroutine's clients stay usable

    def close(self) -> None:
        """End the loop of its coroutines."""
        self._loop.close()

    def answer(self, request: protocol.Load | protocol.Score) -> protocol.Done | protocol.Failed:
        """Do what the hub asks; whatever goes wrong in a reward becomes an answer."""
        try:
            reward = self._reward(request.name, request.args)
            if isinstance(request, protocol.Load):
                return protocol.Done(None)
            return protocol.Done(self._score(reward, request.sample))
        except ConfigError as error:
            return protocol.Failed(str(error), retry=False)
        except InvalidValue as error:
            return protocol.Failed(f"{request.name}: {error}", retry=False)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - code of the user's may raise anything, and it must not end the hub
            return protocol.Failed(f"{request.name}: {type(error).__name__}: {' '.join(str(error).split())[:500]}", retry=True)

    def _reward(self, name: str, args: dict[str, object]) -> function.Score:
        key = json.dumps([name, args], sort_keys=True)
        if key not in self._rewards:
            self._rewards[key] = function.load(name, args)
        return self._rewards[key]

    def _score(self, reward: function.Score, sample: Sample) -> Value:
        value = reward(sample)
        if inspect.isawaitable(value):
            value = self._loop.run(_wait(value))
        return check_value(value)


async def _wait(value: Awaitable[object]) -> object:
    return await value


def serve(connection: socket.socket) -> None:
    """Answer requests until the other end closes."""
    worker = Worker()
    with connection, connection.makefile("rb") as stream, closing(worker):
        _answer_all(worker, connection, stream)


def _answer_all(worker: Worker, connection: socket.socket, stream: BufferedReader) -> None:
    while len(header := stream.read(protocol.HEADER.size)) == protocol.HEADER.size:
        (size,) = protocol.HEADER.unpack(header)
        try:
            reply = worker.answer(protocol.request(stream.read(size)))
        except msgspec.DecodeError as error:
            reply = protocol.Failed(f"the hub asked something unintelligible: {error}", retry=True)
        connection.sendall(protocol.frame(reply))


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
