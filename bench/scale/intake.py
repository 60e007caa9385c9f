"""Measure a learner's intake of groups in parts over a link with a round trip of 40 ms, read ahead
and one at a time.

Broker and learner are processes in two network namespaces of this machine, which are removed at the
end; a process delays the packets between them. The learner is the real reader, ledger and training
thread, with a backend that computes nothing; all groups belong to one step. The groups are small,
and the publisher's broker takes small messages, so that they travel in parts: round trips count
here, not bandwidth. Memory is that of the reading process beyond idle: with these groups at full
speed, and with large ones while training is slower than the link. Needs root.
"""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any, Final

import msgspec
import numpy as np
import uvloop

from bench.scale.groups import made_up_group
from bench.support.hosts.network_namespaces import entered, host_network, why_not
from bench.support.hosts.slow_tunnel import LARGEST_MTU, slow_tunnel
from bench.support.peak_memory import PeakMemory
from broker.contract import wire
from broker.contract.streams import SAMPLES
from broker.jetstream.bus import Bus, LogRecord
from broker.jetstream.flight_window import MOST_BYTES
from broker.server.private_server import BrokerServer
from learner.algorithm.packing import MicroBatchCutter
from learner.algorithm.samples import TrainSample
from learner.config import AlgorithmSection
from learner.consumer import RecordConsumer
from learner.credit.ledger import Ledger
from learner.credit.ticket_rules import DomainRule, TicketRules
from learner.loop import WINDOW_BYTES
from learner.training import BACKLOG_BYTES, TrainingThread

ROUND_TRIP_MS: Final = 40.0
MBIT_PER_S: Final = 10_000.0
MIB: Final = 1 << 20
MAX_PAYLOAD: Final = MIB // 8  # of the broker's messages
SMALL_MIB: Final = 0.25
SMALL_GROUPS: Final = 1000
BEFORE_GROUPS: Final = 60  # of them, one at a time
LARGE_MIB: Final = 9.4  # 16 episodes of 64k tokens
LARGE_GROUPS: Final = 24
LARGE_STEP_S: Final = 0.25  # that training on a large group takes, more than its way over the link
VOCABULARY: Final = 1 << 20
RULE: Final = DomainRule("lake", 1.0, 16, 1, 600.0)


def measure() -> dict[str, Any]:
    """Return records per second read ahead and one at a time, and the most memory of the reader."""
    if problem := why_not():
        raise SystemExit(f"error: intake: {problem}")
    with (
        host_network(2) as network,
        slow_tunnel(
            network, delay_ms=ROUND_TRIP_MS / 2, mbit_per_s=MBIT_PER_S, mtu=LARGEST_MTU
        ) as (address, _),
        tempfile.TemporaryDirectory(prefix="rlearner-intake-") as folder,
        entered(network.hosts[0]),
        BrokerServer(f"{folder}/store", bind=address, store_max_gib=64) as server,
    ):
        for run, count, size_mib in (
            ("small", SMALL_GROUPS, SMALL_MIB),
            ("large", LARGE_GROUPS, LARGE_MIB),
        ):
            asyncio.run(_publish(server.url, run, count, size_mib))
        far = network.inside(1)
        ahead = _learn(far, server.url, "small", SMALL_GROUPS, window_bytes=WINDOW_BYTES)
        large = _learn(
            far, server.url, "large", LARGE_GROUPS, window_bytes=WINDOW_BYTES, step_s=LARGE_STEP_S
        )
        before = _learn(far, server.url, "small", BEFORE_GROUPS)
    # read ahead, on the wire, waiting for the thread
    window_mib = (WINDOW_BYTES + MOST_BYTES + BACKLOG_BYTES) / MIB
    return {
        "intake": {
            "groups": LARGE_GROUPS,
            "group_mib": LARGE_MIB,
            "window_mib": window_mib,
            "peak_mib": max(ahead["peak_mib"], large["peak_mib"]),
            "rate_groups": SMALL_GROUPS,
            "rate_group_mib": SMALL_MIB,
            "records_per_s_at_40_ms": ahead["records_per_s"],
            "records_per_s_before": before["records_per_s"],
        }
    }


async def _publish(url: str, run: str, count: int, size_mib: float) -> None:
    bus = await Bus.connect(url, run, name="publisher", deadline_s=60)
    await bus.ensure_streams()
    bus.link._client._max_payload = MAX_PAYLOAD
    group = msgspec.structs.replace(
        made_up_group(1, int(size_mib * MIB)), pools=[], domain=RULE.name
    )
    versions = wire.column([0, len(group.trajectories[0].loss_mask.data)], "<i4")
    trajectories = [
        msgspec.structs.replace(one, version_runs=versions) for one in group.trajectories
    ]
    group = msgspec.structs.replace(group, trajectories=trajectories, min_version=0)
    for number in range(1, count + 1):
        own = msgspec.structs.replace(group, ticket=number, task_index=number - 1)
        await bus.publish(SAMPLES, own, ticket=number)
    await bus.close()


def _learn(
    inside: Sequence[str],
    url: str,
    run: str,
    count: int,
    *,
    window_bytes: int = 0,
    step_s: float = 0.0,
) -> dict[str, float]:
    """Return the figures of a reader in a process of its own, on another host."""
    options = [url, run, str(count), str(window_bytes), str(step_s)]
    command = [*inside, sys.executable, "-m", "bench.scale.intake", *options]
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, float] = json.loads(child.stdout.splitlines()[-1])
    return figures


# --------------------------------------------------------------------------------------------------
# the reader


class IdleBackend:
    """A backend that waits for as long as a step of its tokens takes, and computes nothing."""

    vocab_size = VOCABULARY

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self.num_samples = 0

    def cutter(self) -> MicroBatchCutter[TrainSample]:
        return MicroBatchCutter(65536)

    def forward_backward(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        self.num_samples += len(samples)
        time.sleep(self._step_s * len(samples) / RULE.group_size)
        return {}

    def step(self) -> dict[str, float]:
        return {}

    def follow_rules(self, *, steps: int, seed: int) -> None:
        pass

    def close(self) -> None:
        pass


def _estimate(trajectories: Sequence[Any], _: AlgorithmSection) -> list[Any]:
    return [np.zeros(len(one.loss_mask.array())) for one in trajectories]


async def _apply(bus: Bus, consumer: RecordConsumer, record: LogRecord, *, waits: bool) -> None:
    """Apply a record as the learner's loop does; ``waits``: until its other parts are deleted."""
    _, actions = consumer.apply(record)
    assert record.parted is not None, record.error
    if waits:
        await bus._parts.drop_others(record.parted)
    else:
        bus.drop_other_parts(record.parted)
    consumer.perform(actions, is_settled=True)


async def _child(
    url: str, run: str, count: int, window_bytes: int, step_s: float
) -> dict[str, float]:
    """Read the groups of one step, and train on them; without a window as before it, parts and
    purges in line.
    """
    bus = await Bus.connect(url, run, name="reader", deadline_s=60)
    ledger = Ledger(TicketRules(1, count, 0, "drop", 0, (RULE,)))
    backend: Any = IdleBackend(step_s)
    training = TrainingThread(lambda: backend, _estimate, AlgorithmSection())
    await training.open()
    consumer = RecordConsumer(ledger, training)
    ledger.open_credit()
    gc.collect()
    records = bus.read_log(SAMPLES, 1, wanted=ledger.awaits, window_bytes=window_bytes)
    with PeakMemory() as peak:
        began = time.monotonic()
        async with aclosing(records):
            while not ledger.full:
                await training.has_room()
                await _apply(bus, consumer, await anext(records), waits=not window_bytes)
        seconds = time.monotonic() - began
        step = await consumer.complete()
    assert step is not None, "the step was abandoned"
    assert (len(step.entries), backend.num_samples) == (count, count * RULE.group_size), (
        step.entries
    )
    await asyncio.to_thread(training.close)
    await bus.close()
    return {"records_per_s": round(count / seconds, 1), "peak_mib": round(peak.most - peak.idle, 1)}


if __name__ == "__main__":
    name, number, window, pause = sys.argv[2:6]
    print(json.dumps(uvloop.run(_child(sys.argv[1], name, int(number), int(window), float(pause)))))
