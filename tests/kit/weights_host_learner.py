"""A process with a Sender of epoch 1 on some host; offers a version for each line of its standard
input.

Usage: weights_host_learner.py URL RUN ID OPTIONS, where OPTIONS is JSON with
    backend: gloo or curve
    timeout_s: longest wait for one bucket
    interface: where it listens; without one, where it reaches the broker
    delta: whether only changes are sent
Each line is JSON: ``version`` to offer, answered by the hash of its content; or ``metrics``,
answered by these.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import torch
from weights_model import content, make_tensors, probe_of

from broker.jetstream.bus import Bus
from broker.weights.memory.staging import plan_of
from broker.weights.protocol.session import TransferSettings
from broker.weights.sender.send import WeightSender
from learner.weights.addresses import weights_address


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


async def main(url: str, run: str, name: str, options: dict[str, Any]) -> None:
    bus = await Bus.connect(url, run, name=name, deadline_s=60)
    await bus.ensure_streams()
    host = weights_address(options.get("interface"), url)
    settings = TransferSettings(
        (options["backend"],), host=host, timeout_s=options.get("timeout_s", 10.0)
    )
    sender = WeightSender(
        bus, plan_of(make_tensors(0), 1), epoch=1, settings=settings, gather_s=1.0
    )
    await sender.start()
    say(event="ready")
    while line := await asyncio.to_thread(sys.stdin.readline):
        request = json.loads(line)
        if "metrics" in request:
            say(metrics=sender.metrics())
            continue
        tensors = make_tensors(100 + request["version"])
        await asyncio.to_thread(sender.offer, request["version"], tensors, probe_of(tensors))
        say(content=content(tensors))


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])))
