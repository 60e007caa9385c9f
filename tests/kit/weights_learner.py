"""A process with a Sender of epoch 1 that kills or stops itself in the middle of a transfer.

Usage: weights_learner.py URL RUN ID OPTIONS, where OPTIONS is JSON with do: ``kill`` or ``stop``,
and one of
    at_bucket: of its first broadcast
    at_byte: of its second version in shared memory, which is read as far as that; with ``on_device`` that of a device,
    see ``memfd_device``
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from typing import Any

import torch
from memfd_device import Memfd
from waits import until
from weights_model import make_tensors, probe_of

from broker.contract.wire import Carrier
from broker.jetstream.bus import Bus
from broker.weights.group import WeightGroup
from broker.weights.memory.staging import StagedVersion, plan_of
from broker.weights.protocol.session import TransferSettings
from broker.weights.sender.send import WeightSender


def end(what: str) -> None:
    print(json.dumps({"event": what}), flush=True)
    os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)


async def read_so_far(sender: WeightSender, options: dict[str, Any]) -> None:
    """A second version that never gets further than ``at_byte``."""
    await until(lambda: "weights/shared" in sender.metrics())
    original = StagedVersion.reached

    def reached(self: StagedVersion, offset: int) -> None:
        original(self, offset)
        if offset >= options["at_byte"]:
            while not self.sending:
                time.sleep(0.02)
            time.sleep(0.5)
            end(options["do"])

    StagedVersion.reached = reached  # type: ignore[method-assign]
    tensors = make_tensors(2)
    await asyncio.to_thread(sender.offer, 1, tensors, probe_of(tensors))


async def main(url: str, run: str, name: str, options: dict[str, Any]) -> None:
    original, sent = WeightGroup._issue, 0

    def issue(self: WeightGroup, bucket: torch.Tensor) -> Any:
        nonlocal sent
        sent += 1
        if sent == options.get("at_bucket"):
            end(options["do"])
        return original(self, bucket)

    WeightGroup._issue = issue  # type: ignore[method-assign]
    bus = await Bus.connect(url, run, name=name, deadline_s=60)
    tensors = make_tensors(1)
    memory = Memfd() if options.get("on_device") else None
    read_by: tuple[Carrier, ...] = ("ipc" if memory else "shared",) if "at_byte" in options else ()
    settings = TransferSettings((*read_by, "gloo"))
    sender = WeightSender(bus, plan_of(tensors, 1), epoch=1, settings=settings, memory=memory)
    await sender.start()
    sender.offer(0, tensors, probe_of(tensors))
    if "at_byte" in options:
        await read_so_far(sender, options)
    await asyncio.sleep(60)


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])))
