"""Servers that join a transfer and never take part, as behind a firewall: the others lose at most
one transfer to them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

import pytest
from test_weights import SETTINGS, Spawn, offer, ready, spawn  # noqa: F401  # fixture
from weights_model import make_tensors

from broker.contract import wire
from broker.contract.streams import WEIGHTSYNC
from broker.errors import RlearnerError
from broker.jetstream.bus import Bus
from broker.jetstream.core_messages import send_request
from broker.nats.nats_errors import NoResponders
from broker.weights.group import WaitMonitor
from broker.weights.memory.staging import plan_of
from broker.weights.protocol.transfer import PEER
from broker.weights.rendezvous.board_client import BoardClient, KeyPair, RendezvousAddress
from broker.weights.sender import membership
from broker.weights.sender.send import WeightSender
from broker.weights.store_messages import StoreMessages

NUM_VERSIONS = 5


async def haunt(bus: Bus, sender: WeightSender, does: str, joined: list[str]) -> None:
    """Join whatever is on offer, as a server of which no data connection ever comes about.

    Args:
        does: ``nothing`` at all; come to the store, say ``ready`` and then nothing; or ``tell``
            then that a peer was
        lost.
    """
    keys = KeyPair.make()
    while True:
        version = int(sender.metrics()["weights/version"])
        join = wire.WeightsJoin(
            server="ghost",
            epoch=1,
            version=max(version, 0),
            plan=sender.plan.digest,
            key=keys.public,
            carriers={"gloo": 1},
        )
        try:
            answer = await send_request(
                bus, WEIGHTSYNC, "1", join, timeout_s=6.0, reply=wire.WeightsSession
            )
        except (RlearnerError, NoResponders):
            continue
        if answer.error:
            await asyncio.sleep(0.05)
            continue
        joined.append(answer.session)
        if does != "nothing":
            address = RendezvousAddress(answer.host, answer.port, answer.key)
            with closing(BoardClient(address, keys, 2.0)) as store:
                lines = StoreMessages(store, answer.session, WaitMonitor())
                lines.say(f"ready/{answer.rank}")
                if does == "tell":
                    await asyncio.sleep(SETTINGS.connect_timeout_s)
                    lines.say(
                        f"done/{answer.rank}",
                        f"{PEER}communicator of {answer.world_size}: timed out",
                    )


@asynccontextmanager
async def ghost(bus: Bus, sender: WeightSender, does: str) -> AsyncIterator[list[str]]:
    joined: list[str] = []
    task = asyncio.create_task(haunt(bus, sender, does, joined))
    try:
        yield joined
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("does", ["nothing", "ready", "tell"])
async def test_a_server_that_joins_and_never_connects_costs_the_others_one_transfer_at_most(
    bus: Bus,
    spawn: Spawn,  # noqa: F811
    does: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # so that it is tried again within this test
    monkeypatch.setattr(membership, "FIRST_DELAY_S", 1.0)
    children = [await spawn("r1"), await spawn("r2")]
    await ready(*children)
    sender = WeightSender(
        bus, plan_of(make_tensors(0), 1), epoch=1, settings=SETTINGS, gather_s=1.5
    )
    await sender.start()
    try:
        async with ghost(bus, sender, does) as joined:
            for version in range(NUM_VERSIONS):
                expected = offer(sender, version)
                loads = await asyncio.gather(
                    *(child.hears(event="loaded", version=version) for child in children)
                )
                assert [load["content"] for load in loads] == [expected, expected]
                await asyncio.sleep(1.0)
            sessions = len(joined)
    finally:
        await sender.close()
    lost = [
        record.getMessage().partition(" failed:")[0]
        for record in caplog.records
        if "weights: sending version" in record.getMessage()
    ]
    assert sessions >= 2, "it was tried again"
    assert [line for line in lost if "r1" in line or "r2" in line] == [
        "weights: sending version 0 to ghost, r1, r2"
    ]
    assert len([line for line in lost if line.endswith("to ghost")]) >= 1
