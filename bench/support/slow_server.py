"""A rollout server that answers after a fixed time, for ``bench.support.hub_scene``."""

from __future__ import annotations

import asyncio
import math
import os
import random
from contextlib import suppress
from typing import Any, Final

import msgspec
import zmq

from broker.channel import local_sockets
from broker.channel.bundle import unpack_bundle
from broker.channel.zmq_address import ServerAddress
from broker.channel.zmq_socket import LoopSocket
from broker.contract import wire
from broker.jetstream.bus import Bus
from broker.runtime.announce import Announcer
from rlearner_text.tokenizer import Tokenizer

JITTER: Final = 0.1  # share of the latency by which an answer may come earlier or later
END: Final = "<|im_end|>"
MANY_SLOTS: Final = 1 << 16


class _Asked(msgspec.Struct):
    """All that the server looks at of a request; its other fields are skipped."""

    request_id: str


class SlowServer:
    """A rollout server that answers any request with a random move after a latency with bounded
    jitter.

    It must cost next to nothing, because it shares two cores with the measured hub: it decodes only
    the id of a request, and sends all answers due within a millisecond together. Hubs reach it by a
    local socket.
    """

    def __init__(self, bus: Bus, tokenizer: Tokenizer, latency_s: float) -> None:
        self.latency_s = latency_s
        self.answered = self.waiting = 0
        end = tokenizer.token_id(END)
        assert end is not None
        self._moves = [wire.column([*tokenizer.encode(letter), end], "<i4") for letter in "LDRU"]
        self._logprobs = wire.column([-1.4, -0.1], "<f4")
        self._versions = wire.column([0, 2], "<i4")
        self._rng = random.Random(0)
        self._read = msgspec.msgpack.Decoder(_Asked).decode
        self._write = msgspec.msgpack.Encoder().encode
        # answers by the millisecond in which they leave
        self._due: dict[int, list[tuple[bytes, str, bytes]]] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: LoopSocket | None = None
        self.address = self._path = ""
        self._announcer = Announcer(bus, self._presence)

    async def start(self) -> None:
        socket = self._context.socket(zmq.ROUTER)
        for limit in (zmq.SNDHWM, zmq.RCVHWM):
            socket.setsockopt(limit, 0)
        name = local_sockets.new_name()
        self._path = local_sockets.path_of(name)
        socket.bind(f"ipc://{self._path}")
        self.address = str(ServerAddress("", "", "", name))
        self._socket = LoopSocket(socket, self._asked)
        await self._announcer.start()

    async def close(self) -> None:
        await self._announcer.close()
        self._due.clear()
        if self._socket is not None:
            self._socket.close()
            with suppress(FileNotFoundError):
                os.unlink(self._path)
        self._context.destroy(linger=0)

    def _asked(self, frames: list[bytes]) -> None:
        route, bundle = frames
        loop = asyncio.get_running_loop()
        now = loop.time()
        for token, request in unpack_bundle(bundle):
            if not token:
                continue  # an abort: the answer comes soon anyway
            due = math.ceil(
                1e3 * (now + self.latency_s * self._rng.uniform(1 - JITTER, 1 + JITTER))
            )
            if due not in self._due:
                self._due[due] = []
                loop.call_at(due / 1e3, self._answer, due)
            self._due[due].append((route, token, self._reply(self._read(request).request_id)))
            self.waiting += 1

    def _answer(self, due: int) -> None:
        assert self._socket is not None
        answers = self._due.pop(due, [])  # none after the end
        for route, token, reply in answers:
            self._socket.post(route, token, reply)
        self.waiting -= len(answers)
        self.answered += len(answers)

    def _reply(self, request_id: str) -> bytes:
        return self._write(
            wire.GenerateReply(
                request_id=request_id,
                server="bench-server",
                token_ids=self._rng.choice(self._moves),
                logprobs=self._logprobs,
                version_runs=self._versions,
                finish_reason="stop",
                policy_version=0,
            )
        )

    def _presence(self) -> wire.Presence:
        common: dict[str, Any] = {
            "role": "rollout",
            "host": "bench",
            "pid": os.getpid(),
            "state": "serving",
        }
        common |= {"policy": wire.ACTOR}
        return wire.Presence(
            id="bench-server",
            address=self.address,
            channel="zmq",
            epoch=1,
            policy_version=0,
            slots=MANY_SLOTS,
            **common,
        )
