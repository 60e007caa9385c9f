"""Who gets weights: servers that are present in the run and asked through the broker, as long as
they are present.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import closing

import pytest
from test_weights import SETTINGS, Spawn, StubRoster, offer, ready, spawn  # noqa: F401  # fixture
from waits import until
from weights_model import make_tensors

from broker.contract import wire
from broker.contract.streams import WEIGHTSYNC
from broker.errors import TransferFailed
from broker.jetstream.bus import Bus
from broker.jetstream.core_messages import send_request
from broker.weights.memory.staging import plan_of
from broker.weights.protocol.session import PLAN_KEY
from broker.weights.rendezvous.board_client import BoardClient, KeyPair, RendezvousAddress
from broker.weights.sender import admission
from broker.weights.sender.send import WeightSender


class PresentServers(StubRoster):
    """Servers that are present, as the test says."""

    async def changed(self, timeout_s: float) -> None:
        await asyncio.sleep(min(timeout_s, 0.05))


@pytest.fixture
def present() -> PresentServers:
    return PresentServers("r1")


@pytest.fixture
async def sender(bus: Bus, present: PresentServers) -> AsyncIterator[WeightSender]:
    made = WeightSender(
        bus, plan_of(make_tensors(0), 1), epoch=1, settings=SETTINGS, roster=present, gather_s=0.1
    )
    await made.start()
    yield made
    await made.close()


async def ask(bus: Bus, sender: WeightSender, server: str, keys: KeyPair) -> wire.WeightsSession:
    join = wire.WeightsJoin(
        server=server,
        epoch=1,
        version=0,
        plan=sender.plan.digest,
        key=keys.public,
        carriers={"gloo": 1},
    )
    return await send_request(bus, WEIGHTSYNC, "1", join, timeout_s=10.0, reply=wire.WeightsSession)


def connect(answer: wire.WeightsSession, keys: KeyPair) -> BoardClient:
    return BoardClient(RendezvousAddress(answer.host, answer.port, answer.key), keys, 0.5)


async def test_a_stranger_that_knows_the_session_gets_nothing(
    bus: Bus,
    sender: WeightSender,
    spawn: Spawn,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission, "PRESENCE_S", 0.2)
    child, keys = await spawn("r1"), KeyPair.make()
    await ready(child)
    expected = offer(sender, 0)
    assert (await child.hears(event="loaded"))["content"] == expected
    answer = await ask(bus, sender, "stranger", keys)
    assert answer.error == "no presence of stranger is heard in this run, so it gets no weights"
    assert (answer.port, answer.key) == (sender._replies.port, sender._replies.key)
    with pytest.raises(TransferFailed, match="no answer from the learner's rendezvous"):
        await asyncio.to_thread(connect, answer, keys)
    assert sender._server is not None
    assert sender._server.admitted() == {"r1"}


async def test_a_server_is_expelled_when_its_presence_goes(
    bus: Bus, sender: WeightSender, present: PresentServers
) -> None:
    offer(sender, 0)
    await until(lambda: sender.metrics()["weights/version"] == 0)
    keys = KeyPair.make()
    answer = await ask(bus, sender, "r1", keys)
    assert (answer.error, answer.rank) == ("", 1)
    with closing(connect(answer, keys)) as member:
        assert member.peek(PLAN_KEY) == sender.plan.text.encode()
        with pytest.raises(RuntimeError, match="read-only"):
            member.set(PLAN_KEY, "another model")
        present.servers.clear()
        assert sender._server is not None
        await until(lambda: not sender._server.admitted())
        with pytest.raises(RuntimeError, match="did not answer"):
            await asyncio.to_thread(member.peek, PLAN_KEY)
    with pytest.raises(TransferFailed, match="no answer"):
        await asyncio.to_thread(connect, answer, keys)


async def test_a_server_whose_presence_comes_a_moment_later_is_admitted(
    bus: Bus, sender: WeightSender, present: PresentServers
) -> None:
    present.servers.clear()
    offer(sender, 0)
    await until(lambda: sender.metrics()["weights/version"] == 0)
    asking = asyncio.create_task(ask(bus, sender, "r2", KeyPair.make()))
    await asyncio.sleep(0.3)
    present.servers.add("r2")
    answer = await asking
    assert (answer.error, answer.version) == ("", 0)


async def test_each_epoch_has_keys_of_its_own(bus: Bus, sender: WeightSender) -> None:
    second = WeightSender(bus, sender.plan, epoch=2, settings=SETTINGS)
    await second.start()
    try:
        assert sender._replies.key != second._replies.key
    finally:
        await second.close()
