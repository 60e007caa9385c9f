"""Weights by shared memory between real processes: who can read the learner's does, the others get
them by gloo, anybody is killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_weights import SETTINGS, Child, Spawn, offer, ready, spawn  # noqa: F401  # fixture
from waits import until
from weights_model import content, make_tensors, probe_of

from broker.jetstream.bus import Bus
from broker.weights.memory.staging import plan_of
from broker.weights.sender.send import WeightSender

SHARED = replace(SETTINGS, carriers=("shared", "gloo"))
OTHER_PROCESSES = [
    "bwrap",
    "--dev-bind",
    "/",
    "/",
    "--unshare-pid",
    "--proc",
    "/proc",
    "--die-with-parent",
]  # sees none of the learner's, as on another host


def sender_of(bus: Bus, epoch: int = 1, delta_full_every: int | None = None) -> WeightSender:
    return WeightSender(
        bus,
        plan_of(make_tensors(0), 1),
        epoch=epoch,
        settings=SHARED,
        delta_full_every=delta_full_every,
    )


@pytest.fixture
async def sender(bus: Bus) -> AsyncIterator[WeightSender]:
    """The first learner's."""
    made = sender_of(bus)
    await made.start()
    yield made
    await made.close()


async def loaded(version: int, *children: Child) -> set[str]:
    loads = await asyncio.gather(
        *(child.hears(event="loaded", version=version) for child in children)
    )
    return {load["content"] for load in loads}


def mapped(child: Child) -> list[str]:
    """What it has mapped of a learner's memory."""
    return [
        line
        for line in Path(f"/proc/{child.pid}/maps").read_text().splitlines()
        if "rlearner-weights" in line
    ]


async def apart() -> dict[str, Any]:
    """How a server is started that cannot read the learner's memory: where it sees no process of
    the learner's, or told so.
    """
    try:
        await asyncio.to_thread(
            subprocess.run, [*OTHER_PROCESSES, "true"], check=True, capture_output=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError):
        return {"apart": True}
    return {"within": OTHER_PROCESSES}


async def test_who_can_reads_and_the_others_are_sent_the_same_version(
    bus: Bus,
    spawn: Spawn,  # noqa: F811
) -> None:
    near, far = [await spawn("r1"), await spawn("r3")], await spawn("r2", **await apart())
    await ready(*near, far)
    sender = sender_of(bus, delta_full_every=100)
    await sender.start()
    tensors, generator = make_tensors(7), torch.Generator().manual_seed(0)

    async def change(version: int, *children: Child) -> dict[str, float]:
        """Offer a version with 3 % of its elements changed; the metrics once all have it."""
        for tensor in tensors.values():
            tensor[torch.rand(tensor.shape, generator=generator) < 0.03] += 0.5
        await asyncio.to_thread(sender.offer, version, tensors, probe_of(tensors))
        assert await loaded(version, *children) == {content(tensors)}
        await until(lambda: not sender._membership.busy)
        return sender.metrics()

    try:
        shares = [
            (await change(version, *near, far))["weights/sent_bytes"] / sender.plan.size_bytes
            for version in range(3)
        ]
        assert shares[0] == 1.0
        assert max(shares[1:]) < 1 / 8  # who is sent them is sent the changes
        metrics = sender.metrics()
        assert (metrics["weights/receivers"], metrics["weights/shared"]) == (3, 2)
        assert (
            metrics["weights/communicators"],
            metrics["weights/deltas"],
            metrics["weights/failures"],
        ) == (1, 2, 0)
        assert [len(mapped(child)) for child in near] == [1, 1]
        assert all(
            " r--s " in line and line.endswith(" (deleted)")
            for child in near
            for line in mapped(child)
        )  # read only; no file has it
        os.kill(far.pid, signal.SIGKILL)
        metrics = await change(3, *near)
        assert (
            metrics["weights/receivers"],
            metrics["weights/shared"],
            metrics["weights/failures"],
        ) == (2, 2, 0)
    finally:
        await sender.close()


async def test_readers_killed_or_asleep_in_the_middle_cost_the_others_nothing_and_serve_nothing_wrong(
    sender: WeightSender,
    spawn: Spawn,  # noqa: F811
) -> None:
    killed, asleep = (
        await spawn("r1", at_bucket=6, do="kill"),
        await spawn("r2", at_bucket=6, do="stop"),
    )
    near, far = await spawn("r3"), await spawn("r4", apart=True)
    await ready(killed, asleep, near, far)
    expected = offer(sender, 0)
    await asyncio.gather(killed.hears(event="kill"), asleep.hears(event="stop"))
    assert await loaded(0, near, far) == {expected}
    # by the timeout alone, for nobody says who is there
    await until(lambda: sender.metrics()["weights/failures"] == 1)
    for version in (1, 2, 3):  # both buffers are written again
        expected = offer(sender, version)
        assert await loaded(version, near, far) == {expected}
    assert sender.metrics()["weights/failures"] == 1
    os.kill(asleep.pid, signal.SIGCONT)
    assert await loaded(3, asleep) == {expected}
    assert [said["event"] for said in asleep.said] == ["ready", "stop", "error", "loaded"]
    assert (
        "overwritten while it was read" in asleep.said[2]["reason"]
        or "the learner stopped it" in asleep.said[2]["reason"]
    )
    assert [said for child in (near, far) for said in child.said if said["event"] == "error"] == []


async def test_a_learner_that_is_killed_in_the_middle_leaves_nothing_and_is_succeeded(
    bus: Bus,
    spawn: Spawn,  # noqa: F811
) -> None:
    children = [await spawn("r1"), await spawn("r2")]
    learner = await spawn("learner", script="weights_learner.py", at_byte=5 << 20, do="kill")
    await asyncio.gather(*(child.hears(event="loaded", version=0) for child in children))
    await learner.hears(event="kill")
    # what it had is let go of when it is gone
    await until(lambda: not any(mapped(child) for child in children))
    successor = sender_of(bus, epoch=2)
    await successor.start()
    try:
        expected = offer(successor, 0)
        loads = await asyncio.gather(*(child.hears(event="loaded", epoch=2) for child in children))
        assert {load["content"] for load in loads} == {expected}
        await until(lambda: "weights/shared" in successor.metrics())
        assert successor.metrics()["weights/shared"] == 2
        for child in children:
            os.kill(child.pid, signal.SIGKILL)
        assert not [name for name in os.listdir("/dev/shm") if "rlearner" in name]
    finally:
        await successor.close()
