"""A server of the request channel as a process of its own: ``python channel_server_child.py URL
RUN``.

Prints its address. Answers at once, with as many tokens as were asked for.
"""

from __future__ import annotations

import asyncio
import sys

import numpy as np

from broker.channel.over_zmq import ZmqServer
from broker.contract import wire
from broker.jetstream.bus import Bus


async def answer(asked: wire.GenerateRequest) -> wire.GenerateReply:
    count = asked.sampling.max_tokens
    return wire.GenerateReply(
        request_id=asked.request_id, server="s1", token_ids=wire.column(np.ones(count), "<i4"),
        logprobs=wire.column(np.zeros(count), "<f4"), version_runs=wire.column([1, count], "<i4"),
        finish_reason="length", policy_version=1,
    )  # fmt: skip


async def main(url: str, run: str) -> None:
    bus = await Bus.connect(url, run, name="s1", deadline_s=60)
    server = ZmqServer(bus, "s1", "127.0.0.1")
    await server.start(answer, lambda request_id: None)
    print(server.address, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
