"""What every weight carrier does, over the registry: facts that fit together, and transfers between
real processes. The GPU's memory is a double for ipc; nccl needs two GPUs, see ``bench.gpu.weights``.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import get_args

import pytest
from memfd_device import Memfd
from test_weights import SETTINGS, Child, Spawn, offer, ready, spawn  # noqa: F401  # fixture
from waits import until
from weights_model import make_tensors

from broker.contract import wire
from broker.errors import TransferFailed
from broker.jetstream.bus import Bus
from broker.weights.carriers import CARRIERS, READ, reading_carrier, selected_carrier
from broker.weights.carriers.base import WeightCarrier
from broker.weights.carriers.selection import (
    AUTO,
    accepted_carriers,
    offered_carriers,
    worker_carriers,
)
from broker.weights.memory.staging import plan_of
from broker.weights.rendezvous.board_client import KeyPair
from broker.weights.rendezvous.board_server import BoardServer
from broker.weights.sender.send import WeightSender
from learner.config import TrainSection


@pytest.fixture(params=CARRIERS.values(), ids=CARRIERS)
def carrier(request: pytest.FixtureRequest) -> WeightCarrier:
    return request.param


@pytest.fixture
def receiver_options(carrier: WeightCarrier) -> dict[str, list[str]]:
    """How a receiver is started that can use the carrier."""
    if carrier.claims_gpu:
        pytest.skip(f"{carrier.name} needs two GPUs, where bench.gpu.weights measures it")
    return {"visible": ["left"]} if carrier.on_gpu else {}


@pytest.fixture
async def sender(
    bus: Bus, carrier: WeightCarrier, receiver_options: dict[str, list[str]]
) -> AsyncIterator[WeightSender]:
    """A learner that offers this carrier and no other."""
    sender = WeightSender(
        bus,
        plan_of(make_tensors(0), 1),
        epoch=1,
        settings=replace(SETTINGS, carriers=(carrier.name,)),
        memory=Memfd() if carrier.on_gpu else None,
    )
    await sender.start()
    yield sender
    await sender.close()


async def loaded(version: int, *receivers: Child) -> set[str]:
    return {
        (await receiver.hears(event="loaded", version=version))["content"] for receiver in receivers
    }


# ------------------------------------------------------------------------------------------------
# facts


def test_wire_and_settings_name_every_carrier() -> None:
    assert set(CARRIERS) == set(get_args(wire.Carrier))
    assert [carrier.name for carrier in CARRIERS.values()] == list(CARRIERS)
    for name in (AUTO, *CARRIERS):
        assert TrainSection(weights_backend=name).weights_backend == name


def test_facts_fit_together(carrier: WeightCarrier) -> None:
    assert carrier.description
    assert selected_carrier(carrier.name) is carrier
    assert bool(carrier.gpu_use) == bool(carrier.host_carrier) == carrier.on_gpu
    assert bool(carrier.gpu_conflict) == carrier.claims_gpu
    for other in (carrier.fallback, carrier.host_carrier):
        assert other is None or not CARRIERS[other].on_gpu
    if carrier.reads_memory:  # a server on another host needs another one
        assert carrier.fallback is not None
        assert carrier.fallback not in READ
        assert reading_carrier(on_gpu=carrier.on_gpu) == carrier.name
        assert not carrier.serves_stripes
    if carrier.claims_gpu:
        assert carrier.on_gpu


def test_selection_follows_the_facts(carrier: WeightCarrier) -> None:
    name = carrier.name
    assert offered_carriers(name, on_gpu=True)[0] == name
    assert (name in offered_carriers(AUTO, on_gpu=True)) == carrier.is_automatic
    assert (name in offered_carriers(AUTO, on_gpu=False)) == (
        carrier.is_automatic and not carrier.on_gpu
    )
    assert (name in accepted_carriers()) == (name not in READ and not carrier.claims_gpu)
    assert name in accepted_carriers(reads=name if carrier.reads_memory else None, on_gpu=True)
    assert (name in worker_carriers("workers", 2, on_gpu=True)) == carrier.serves_workers
    assert name not in worker_carriers("server", 2, on_gpu=True)


def test_weights_in_host_memory(carrier: WeightCarrier) -> None:
    expected = {
        "ipc": "shared with train.device cpu: ipc is read in a GPU's memory",
        "nccl": "gloo with train.device cpu: nccl sends between GPUs",
    }
    assert carrier.host_problem("train.device cpu") == expected.get(carrier.name, "")


def test_registry_without_torch() -> None:
    code = """
import sys
import broker.weights.carriers.selection, broker.weights.sender.membership
print("torch" in sys.modules)
"""
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert process.stdout.split() == ["False"]


def test_no_communicator_where_memory_is_read(carrier: WeightCarrier) -> None:
    if not carrier.reads_memory:
        assert type(carrier).open_group is not WeightCarrier.open_group
        return
    server = BoardServer("127.0.0.1")
    try:
        server.admit("r1", KeyPair.make().public)
        with pytest.raises(TransferFailed, match=f"carrier {carrier.name} has no communicator"):
            carrier.open_group(server.store(1.0), "g", rank=0, size=2, settings=SETTINGS)
    finally:
        server.close()


# ------------------------------------------------------------------------------------------------
# transfers


async def test_versions_arrive_byte_for_byte(
    carrier: WeightCarrier,
    sender: WeightSender,
    receiver_options: dict[str, list[str]],
    spawn: Spawn,  # noqa: F811
) -> None:
    receivers = [await spawn(name, **receiver_options) for name in ("r1", "r2")]
    await ready(*receivers)
    for version in range(3):
        expected = offer(sender, version)
        assert await loaded(version, *receivers) == {expected}
    late = await spawn("r3", seed=5, **receiver_options)
    assert await loaded(2, late) == {expected}
    await until(lambda: not sender._membership.busy)
    metrics = sender.metrics()
    assert metrics["weights/failures"] == 0
    assert metrics["weights/shared"] == carrier.reads_memory  # of the last transfer, to one server
    assert bool(metrics["weights/communicators"]) == (not carrier.reads_memory)


async def test_receiver_refuses_wrong_bytes(
    sender: WeightSender,
    receiver_options: dict[str, list[str]],
    spawn: Spawn,  # noqa: F811
) -> None:
    receiver = await spawn("r1", at_bucket=7, do="corrupt", **receiver_options)
    await ready(receiver)
    expected = offer(sender, 0)
    assert await loaded(0, receiver) == {expected}
    assert [said["event"] for said in receiver.said] == ["ready", "error", "loaded"]
    assert "digest of version 0: received" in receiver.said[1]["reason"]


async def test_killed_receiver_costs_no_other_its_weights(
    sender: WeightSender,
    receiver_options: dict[str, list[str]],
    spawn: Spawn,  # noqa: F811
) -> None:
    victim = await spawn("r1", at_bucket=4, do="kill", **receiver_options)
    receiver = await spawn("r2", **receiver_options)
    await ready(victim, receiver)
    expected = offer(sender, 0)
    await victim.hears(event="kill")
    assert await loaded(0, receiver) == {expected}
    expected = offer(sender, 1)
    assert await loaded(1, receiver) == {expected}
