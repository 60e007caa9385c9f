"""A process with a Receiver, for the tests of the weight channel; says what happens to it as lines
of JSON.

Usage: weights_child.py URL RUN ID OPTIONS, where OPTIONS is JSON:
    seed: of the tensors it starts with        tensors: names and shapes, see ``weights_model``
    at_bucket, do: when that many buckets have come, ``kill`` or ``stop`` itself, or flip a bit (``corrupt``), once;
    ``then_kill_at``: kill
        itself at a later one
    bad_loads: how many loads store wrong values
    apart: it cannot read the learner's memory, as on another host
    dtype: what the tensors travel as
    visible: units of ``memfd_device`` that it sees, where the learner's memory is of one
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Any

import torch
from memfd_device import Memfd
from torch import Tensor
from weights_model import content, make_tensors, probe_logprobs

from broker.contract import wire
from broker.jetstream.bus import Bus
from broker.weights.digest import BucketDigest, digest_bucket
from broker.weights.memory import reading, shared
from broker.weights.probe import check_probe
from broker.weights.protocol.session import TransferSettings
from broker.weights.receiver import follow
from broker.weights.receiver.receive import WeightReceiver


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


class Saying(logging.Handler):
    """Passes on what the receiver complains about."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            say(event="error", reason=record.getMessage())


def misbehave(at_bucket: int, what: str, then_kill_at: int = 0) -> None:
    """Wrap the digest, which sees every bucket as it comes: of one that was sent, and of one that
    was read.
    """
    sent, seen = digest_bucket, 0

    def misled(bucket: Tensor) -> None:
        nonlocal seen
        seen += 1
        if seen == at_bucket and what == "corrupt":
            bucket[len(bucket) // 2] ^= 16
        elif seen in (at_bucket, then_kill_at):
            now = what if seen == at_bucket else "kill"
            say(event=now)
            # this thread at once
            signal.pthread_kill(
                threading.get_ident(), signal.SIGKILL if now == "kill" else signal.SIGSTOP
            )

    def digest(bucket: Tensor) -> bytes:
        misled(bucket)
        return sent(bucket)

    class Digest(BucketDigest):
        def finish(self) -> bytes:
            misled(self._bucket)
            return sent(self._bucket)

    vars(follow)["digest_bucket"], vars(reading)["BucketDigest"] = digest, Digest


async def main(url: str, run: str, server: str, options: dict[str, Any]) -> None:
    if "do" in options:
        misbehave(options["at_bucket"], options["do"], options.get("then_kill_at", 0))
    if options.get("apart"):
        vars(shared)["ADDRESS"] = re.compile("nowhere")
    bus = await Bus.connect(url, run, name=server, deadline_s=60)
    held = make_tensors(options.get("seed", 0), options.get("tensors"))
    bad_loads = options.get("bad_loads", 0)

    async def load(tensors: Mapping[str, Tensor], offer: wire.WeightsOffer) -> None:
        nonlocal bad_loads
        for name, tensor in tensors.items():
            held[name].copy_(tensor)
        if bad_loads:
            bad_loads -= 1
            held["embed"].mul_(3.0)
        check_probe(offer.probe, probe_logprobs(held))
        say(
            event="loaded",
            epoch=offer.epoch,
            version=offer.version,
            content=content(held),
            transferred=bool(tensors),
        )

    memory = Memfd(visible=options["visible"]) if "visible" in options else None
    patience = TransferSettings(connect_timeout_s=options.get("connect_timeout_s", 2.0))
    dtype = options.get("dtype")
    receiver = WeightReceiver(
        bus, server, held, load, bucket_mib=1, dtype=dtype, settings=patience, memory=memory
    )
    await receiver.start()
    say(event="ready")
    await asyncio.sleep(120)


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    logging.getLogger("broker.weights.receiver.receive").addHandler(Saying())
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])))
