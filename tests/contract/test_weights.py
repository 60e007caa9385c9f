"""The weight channel between real processes: one sender here, receivers that are killed, stopped,
late or wrong.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from nursery import NURSERY, Born
from torch import Tensor
from waits import LONG_S, until
from weights_model import SHAPES, content, make_tensors, probe_of

from broker.contract import wire
from broker.contract.streams import WEIGHTS
from broker.errors import Fenced
from broker.jetstream.bus import Bus
from broker.runtime.presence import Roster
from broker.weights.memory.staging import plan_of
from broker.weights.protocol.session import TransferSettings
from broker.weights.sender.send import WeightSender

SETTINGS = TransferSettings(timeout_s=2.0, connect_timeout_s=2.0)
CURVE = replace(SETTINGS, carriers=("curve",))
# Where nothing is to run out of time: a loaded machine must not end a transfer.
PATIENT = replace(SETTINGS, timeout_s=LONG_S, connect_timeout_s=LONG_S)
PATIENT_CURVE = replace(PATIENT, carriers=("curve",))
KIT = Path(__file__).parents[1] / "kit"


class Child:
    """A receiving process and what it said."""

    def __init__(self, process: asyncio.subprocess.Process | Born) -> None:
        self.process = process
        self.said: list[dict[str, Any]] = []

    @property
    def pid(self) -> int:
        return self.process.pid

    async def hears(self, timeout_s: float = LONG_S, **fields: Any) -> dict[str, Any]:
        """The next line with these fields."""
        assert self.process.stdout is not None
        async with asyncio.timeout(timeout_s):
            while line := await self.process.stdout.readline():
                said = json.loads(line)
                self.said.append(said)
                if said.items() >= fields.items():
                    return said
        raise AssertionError(f"ended without {fields}; said {self.said}")


Spawn = Callable[..., Awaitable[Child]]


@pytest.fixture
async def spawn(broker_url: str, run_name: str, bus: Bus) -> AsyncIterator[Spawn]:
    """Starts receivers; all of them are killed afterwards."""
    children: list[Child] = []

    async def start(
        server: str, *, script: str = "weights_child.py", within: Sequence[str] = (), **options: Any
    ) -> Child:
        if not within:
            children.append(
                Child(await NURSERY.bear(script, broker_url, run_name, server, json.dumps(options)))
            )
            return children[-1]
        process = await asyncio.create_subprocess_exec(
            *within,
            sys.executable,
            str(KIT / script),
            broker_url,
            run_name,
            server,
            json.dumps(options),
            stdout=asyncio.subprocess.PIPE,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([str(KIT), str(KIT.parents[1])]),
            },
        )
        children.append(Child(process))
        return children[-1]

    yield start
    for child in children:
        if child.process.returncode is None:
            child.process.kill()
        await child.process.wait()


@pytest.fixture(params=[SETTINGS, CURVE], ids=["gloo", "curve"])
async def sender(bus: Bus, request: pytest.FixtureRequest) -> AsyncIterator[WeightSender]:
    """The first learner's."""
    made = WeightSender(bus, plan_of(make_tensors(0), 1), epoch=1, settings=request.param)
    await made.start()
    yield made
    await made.close()


@pytest.fixture(params=[PATIENT, PATIENT_CURVE], ids=["gloo", "curve"])
async def patient_sender(bus: Bus, request: pytest.FixtureRequest) -> AsyncIterator[WeightSender]:
    """One whose transfers never run out of time."""
    sender = WeightSender(bus, plan_of(make_tensors(0), 1), epoch=1, settings=request.param)
    await sender.start()
    yield sender
    await sender.close()


def offer(sender: WeightSender, version: int) -> str:
    """Offer a version whose content follows from its number; the content's hash."""
    tensors = make_tensors(100 + version)
    sender.offer(version, tensors, probe_of(tensors))
    return content(tensors)


async def ready(*children: Child) -> None:
    await asyncio.gather(*(child.hears(event="ready") for child in children))


async def test_two_receivers_get_identical_bytes_over_one_communicator(
    patient_sender: WeightSender, spawn: Spawn
) -> None:
    children = [
        await spawn("r1", connect_timeout_s=LONG_S),
        await spawn("r2", connect_timeout_s=LONG_S),
    ]
    await ready(*children)
    for version in range(4):
        expected = offer(patient_sender, version)
        loads = await asyncio.gather(
            *(child.hears(event="loaded", version=version) for child in children)
        )
        assert [load["content"] for load in loads] == [expected, expected]
    assert patient_sender.metrics()["weights/failures"] == 0
    assert patient_sender.metrics()["weights/communicators"] == 1
    assert patient_sender.metrics()["weights/sent_bytes"] == patient_sender.plan.size_bytes
    assert patient_sender.metrics()["weights/receivers"] == 2
    assert patient_sender.metrics()["weights/gbytes_per_s"] > 0


async def test_late_joiner_gets_the_newest_version_at_any_time(
    patient_sender: WeightSender, spawn: Spawn
) -> None:
    first = await spawn("r1", connect_timeout_s=LONG_S)
    await ready(first)
    offer(patient_sender, 0)
    expected = offer(patient_sender, 1)
    await first.hears(event="loaded", version=1)
    late = await spawn("r2", connect_timeout_s=LONG_S)
    assert (await late.hears(event="loaded"))["content"] == expected
    expected = offer(patient_sender, 2)
    loads = await asyncio.gather(
        *(child.hears(event="loaded", version=2) for child in (first, late))
    )
    assert [load["content"] for load in loads] == [expected, expected]
    assert patient_sender.metrics()["weights/failures"] == 0


async def test_killed_in_the_middle_costs_the_others_little(
    sender: WeightSender, spawn: Spawn
) -> None:
    victim, survivor = await spawn("r1", at_bucket=6, do="kill"), await spawn("r2")
    await ready(victim, survivor)
    expected = offer(sender, 0)
    await victim.hears(event="kill")
    started = time.monotonic()
    assert (await survivor.hears(event="loaded", version=0))["content"] == expected
    assert time.monotonic() - started < SETTINGS.timeout_s + 3
    await until(lambda: sender.metrics()["weights/failures"] >= 1)


async def test_stopped_in_the_middle_costs_its_timeout_at_most(
    sender: WeightSender, spawn: Spawn
) -> None:
    victim, survivor = await spawn("r1", at_bucket=6, do="stop"), await spawn("r2")
    await ready(victim, survivor)
    expected = offer(sender, 0)
    await victim.hears(event="stop")
    started = time.monotonic()
    tensors = make_tensors(101)
    assert sender.offer(1, tensors, probe_of(tensors)) < 1.0  # training does not wait for it
    load = await survivor.hears(event="loaded")
    if "curve" in sender.settings.carriers:  # the others do not even wait for it
        assert time.monotonic() - started < SETTINGS.timeout_s
        assert (load["version"], load["content"]) == (0, expected)
        load = await survivor.hears(event="loaded")
    assert time.monotonic() - started < SETTINGS.timeout_s + 3
    assert load["version"] == 1
    assert load["content"] == content(tensors) != expected
    os.kill(victim.pid, signal.SIGCONT)  # it finds itself left behind, and catches up
    assert (await victim.hears(event="loaded"))["content"] == load["content"]


class StubRoster(Roster):
    """Says what the test says."""

    def __init__(self, *servers: str) -> None:
        self.servers = set(servers)

    def alive(self, role: str) -> list[wire.Presence]:
        assert role == "rollout"
        return [
            wire.Presence(role=role, id=server, host="h", pid=1, state="serving")
            for server in sorted(self.servers)
        ]


class Held(dict[str, Tensor]):
    """Tensors of which the last is not given before the transfer has begun, and then late."""

    def __init__(self, sender: WeightSender, version: int, late_s: float) -> None:
        super().__init__(make_tensors(100 + version))
        self.sender, self.late_s, self.was_sending = sender, late_s, False

    def get(self, name: str, default: object = None) -> Tensor:
        if name == max(self):
            deadline = time.monotonic() + 20
            while not self.was_sending and time.monotonic() < deadline:
                self.was_sending = any(side.sending for side in self.sender._staging._sides)
                time.sleep(0.01)
            time.sleep(self.late_s)
        return self[name]


async def test_a_version_is_sent_while_it_is_packed(sender: WeightSender, spawn: Spawn) -> None:
    child = await spawn("r1")
    await ready(child)
    offer(sender, 0)
    await child.hears(event="loaded", version=0)
    failures = 0
    for version, late_s in ((1, 0.0), (2, SETTINGS.timeout_s + 1)):
        tensors = Held(sender, version, late_s)
        await asyncio.to_thread(sender.offer, version, tensors, probe_of(dict(tensors)))
        assert tensors.was_sending
        assert (await child.hears(event="loaded", version=version))["content"] == content(
            dict(tensors)
        )
        # the transfer was given up, the packing was not, and the next try is right
        failures += late_s > SETTINGS.timeout_s
        assert sender.metrics()["weights/failures"] == failures


@pytest.mark.parametrize("settings", [PATIENT, PATIENT_CURVE], ids=["gloo", "curve"])
async def test_changes_are_sent_to_those_who_hold_the_rest(
    bus: Bus, spawn: Spawn, settings: TransferSettings
) -> None:
    # of 29 buckets each: in the third version
    first = await spawn("r1", at_bucket=60, do="corrupt", connect_timeout_s=LONG_S)
    await ready(first)
    sender = WeightSender(
        bus, plan_of(make_tensors(0), 1), epoch=1, settings=settings, delta_full_every=100
    )
    await sender.start()
    tensors, generator = make_tensors(7), torch.Generator().manual_seed(0)

    async def change(version: int, *children: Child) -> float:
        """Offer a version with 3 % of its elements changed; the bytes sent of those of the model."""
        for tensor in tensors.values():
            tensor[torch.rand(tensor.shape, generator=generator) < 0.03] += 0.5
        await asyncio.to_thread(sender.offer, version, tensors, probe_of(tensors))
        loads = await asyncio.gather(
            *(child.hears(event="loaded", version=version) for child in children)
        )
        assert {load["content"] for load in loads} == {content(tensors)}
        await until(lambda: not sender._membership.busy)
        return sender.metrics()["weights/sent_bytes"] / sender.plan.size_bytes

    try:
        assert await change(0, first) == 1.0
        assert await change(1, first) < 1 / 8
        # a bit was flipped on arrival: the digest says so, and everything is sent
        assert await change(2, first) == 1.0
        assert [
            "digest of version 2" in said["reason"]
            for said in first.said
            if said["event"] == "error"
        ] == [True]
        assert await change(3, first) < 1 / 8
        # gets all of version 3 before it is ready for more
        late = await spawn("r2", connect_timeout_s=LONG_S)
        await late.hears(event="loaded", version=3)
        assert await change(4, first, late) < 1 / 8
        assert sender.metrics()["weights/deltas"] == 3
    finally:
        await sender.close()


async def test_member_that_lost_presence_ends_a_transfer_before_its_timeout(
    bus: Bus, spawn: Spawn
) -> None:
    victim, survivor = await spawn("r1", at_bucket=6, do="stop"), await spawn("r2")
    await ready(victim, survivor)
    roster = StubRoster("r1", "r2")
    sender = WeightSender(
        bus,
        plan_of(make_tensors(0), 1),
        epoch=1,
        settings=TransferSettings(timeout_s=60.0),
        roster=roster,
    )
    await sender.start()
    try:
        expected = offer(sender, 0)
        await victim.hears(event="stop")
        roster.servers.discard("r1")
        started = time.monotonic()
        assert (await survivor.hears(event="loaded"))["content"] == expected
        assert time.monotonic() - started < 8
    finally:
        started = time.monotonic()
        await sender.close()
        assert time.monotonic() - started < 3


async def test_corrupted_bytes_are_not_loaded(sender: WeightSender, spawn: Spawn) -> None:
    child = await spawn("r1", at_bucket=3, do="corrupt")
    await ready(child)
    expected = offer(sender, 0)
    error = await child.hears(event="error")
    assert "digest of version 0" in error["reason"]
    assert "nothing was loaded" in error["reason"]
    assert (await child.hears(event="loaded"))["content"] == expected  # the next try is clean
    assert [said["event"] for said in child.said] == ["ready", "error", "loaded"]


async def test_loaded_wrong_is_not_served(sender: WeightSender, spawn: Spawn) -> None:
    child = await spawn("r1", bad_loads=1)
    await ready(child)
    expected = offer(sender, 0)
    assert "loaded incorrectly" in (await child.hears(event="error"))["reason"]
    assert (await child.hears(event="loaded"))["content"] == expected


async def test_matching_digest_is_adopted_without_a_transfer(
    sender: WeightSender, spawn: Spawn
) -> None:
    child = await spawn("r1", seed=100)
    await ready(child)
    expected = offer(sender, 0)
    load = await child.hears(event="loaded", version=0)
    assert load["content"] == expected
    assert load["transferred"] is False
    assert "weights/seconds" not in sender.metrics()


async def test_another_model_is_refused_in_one_line_with_the_first_difference(
    sender: WeightSender, spawn: Spawn
) -> None:
    child = await spawn("r1", tensors={**SHAPES, "layers.0.down": [2048, 512]})
    await ready(child)
    offer(sender, 0)
    reason = (await child.hears(event="error"))["reason"]
    assert reason == (
        "weights: epoch 1 version 0 is another model than the one here: "
        "layers.0.down float32[2048, 512] here is layers.0.down float32[2048, 1024] in the offer"
    )


async def becomes_fenced(sender: WeightSender) -> bool:
    for _ in range(200):
        if sender.fenced:
            return True
        await asyncio.sleep(0.05)
    return False


async def test_newer_learner_takes_over_and_the_older_is_fenced(
    bus: Bus, sender: WeightSender, spawn: Spawn
) -> None:
    child = await spawn("r1")
    await ready(child)
    offer(sender, 5)
    await child.hears(event="loaded", epoch=1, version=5)
    second = WeightSender(bus, sender.plan, epoch=2, settings=SETTINGS)
    await second.start()
    try:
        expected = offer(second, 4)  # resumed from a checkpoint before version 5
        assert (await child.hears(event="loaded", epoch=2))["content"] == expected
        offer(sender, 6)
        assert await becomes_fenced(sender)
        async for newest in bus.watch_last(WEIGHTS):
            assert isinstance(newest, wire.WeightsOffer)
            assert (newest.epoch, newest.version) == (2, 4)
            break
        third = WeightSender(bus, sender.plan, epoch=1, settings=SETTINGS)
        with pytest.raises(Fenced, match="epoch 2 offers weights, this learner is epoch 1"):
            await third.start()
    finally:
        await second.close()


@pytest.mark.parametrize("do", ["kill", "stop"])
async def test_learner_that_dies_or_hangs_in_the_middle_is_succeeded(
    bus: Bus, spawn: Spawn, do: str
) -> None:
    children = [await spawn("r1"), await spawn("r2")]
    await ready(*children)
    learner = await spawn("learner", script="weights_learner.py", at_bucket=9, do=do)
    await learner.hears(event=do)
    successor = WeightSender(bus, plan_of(make_tensors(0), 1), epoch=2, settings=SETTINGS)
    await successor.start()
    try:
        expected = offer(successor, 0)
        started = time.monotonic()
        loads = await asyncio.gather(*(child.hears(event="loaded") for child in children))
        assert [(load["epoch"], load["content"]) for load in loads] == [(2, expected)] * 2
        assert time.monotonic() - started < 10
    finally:
        await successor.close()


@pytest.mark.parametrize("what", ["_publish_versions", "_send"])
async def test_what_ends_the_sender_is_raised_to_its_owner(
    bus: Bus, spawn: Spawn, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise LookupError("nobody foresaw this")

    monkeypatch.setattr(
        "broker.weights.sender.send.lead"
        if what == "_send"
        else "broker.weights.sender.send.OfferStore.publish",
        fails,
    )
    sender = WeightSender(bus, plan_of(make_tensors(0), 1), epoch=1, settings=SETTINGS)
    await sender.start()
    joining = asyncio.create_task(sender.join())
    if what == "_send":
        await ready(await spawn("r1"))
    offer(sender, 1)
    with pytest.raises(LookupError, match="nobody foresaw this"):
        await asyncio.wait_for(joining, LONG_S)
    await sender.close()
