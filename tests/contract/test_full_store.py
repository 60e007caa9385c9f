"""A broker whose store is full: what must be stored is, everything else waits, and each process says so once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from broker import reserve, wire
from broker.examples import EXAMPLES
from broker.jetstream import Bus
from broker.runspec import publish_runspec
from broker.server import BrokerServer
from broker.streams import CONTROL, RESERVE, RUNS, SAMPLES, WEIGHTS

LIMIT_MIB = 352  # the logs of evaluations and dead letters have 320 MiB reserved, of which they use nothing here
PIECE = b"x" * (4 << 20)


class Small(BrokerServer):
    """The server's limit, as in ``rlearner up``, or that of an account, as on a cluster."""

    def __init__(self, store: Path, *, account: bool) -> None:
        super().__init__(str(store), store_max_gib=(8 if account else LIMIT_MIB / 1024))
        self._account = account

    def _configuration(self) -> str:
        accounts = f"accounts {{ A {{ jetstream {{ max_file: {LIMIT_MIB}MiB, max_mem: 64MiB }}, users: [{{user: a, password: a}}] }} }}"
        return super()._configuration() + (f"{accounts}\nno_auth_user: a\n" if self._account else "")


@pytest.fixture(params=["server", "account"])
def broker_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with Small(tmp_path / "broker", account=request.param == "account") as server:
        yield server.url


class Filler:
    """Takes what room there is in a stream of its own, and gives it back."""

    def __init__(self, bus: Bus) -> None:
        self._link = bus.link

    async def fill(self) -> None:
        body = {"name": "filler", "subjects": ["filler"], "storage": "file", "num_replicas": 1}
        await self._call("$JS.API.STREAM.CREATE.filler", json.dumps(body).encode())
        for size in (len(PIECE), 1 << 16, 1 << 8, 0):
            while b'"error"' not in await self._call("filler", PIECE[:size]):
                pass

    async def free(self) -> None:
        await self._call("$JS.API.STREAM.PURGE.filler", b"")

    async def _call(self, subject: str, data: bytes) -> bytes:
        return bytes((await self._link.call(subject, data, timeout_s=20.0)).data)


@pytest.fixture
async def filler(bus: Bus) -> AsyncIterator[Filler]:
    made = Filler(bus)
    yield made
    await made.free()


def closed(number: int) -> wire.Closed:
    return wire.Closed(ticket=number, domain="lake", reason="late", detail="too old", by="hub")


def spec(bus: Bus) -> wire.RunSpec:
    return wire.RunSpec(run=bus.run, wire_version=wire.WIRE_VERSION, epoch=0, config={}, model_path="")


async def held(bus: Bus) -> int:
    return sum((await bus.depth(RESERVE)).values())


async def test_what_a_restart_needs_is_stored_in_a_full_broker(bus: Bus, filler: Filler) -> None:
    assert await reserve.fill(bus.link, bus.run, 0)
    assert await held(bus) == reserve.PIECES
    await filler.fill()
    assert not await reserve.has_room(bus.link, bus.run)
    ordinary = asyncio.create_task(bus.publish(SAMPLES, closed(1), ticket=1))
    await asyncio.sleep(1.0)
    assert not ordinary.done()
    async with asyncio.timeout(20):
        assert await publish_runspec(bus, spec(bus)) == 1
        await (await bus.key_value(CONTROL)).put(bus.run, wire.DesiredState(state="paused"))
        assert await bus.publish(WEIGHTS, EXAMPLES[wire.WeightsOffer]) == 1
    assert await held(bus) == 0
    assert await ordinary == 1
    found = await (await bus.key_value(RUNS)).get(bus.run)
    assert found is not None
    assert isinstance(found[0], wire.RunSpec)
    assert found[0].epoch == 1


async def test_it_is_said_once_and_once_more_when_it_is_over(bus: Bus, filler: Filler, caplog: pytest.LogCaptureFixture) -> None:
    await filler.fill()
    publishes = [asyncio.create_task(bus.publish(SAMPLES, closed(number), ticket=number)) for number in range(1, 41)]
    await asyncio.sleep(4.0)  # of the old and the new pauses many have passed
    assert not any(publish.done() for publish in publishes)
    said = [record.getMessage() for record in caplog.records if "store" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith(f"rl.{bus.run}.samples: the broker at {bus.link.where} cannot store: ")
    assert bus.link.refusals.full
    await filler.free()
    async with asyncio.timeout(20):
        assert sorted(await asyncio.gather(*publishes)) == list(range(1, 41))
    said = [record.getMessage() for record in caplog.records if "store" in record.getMessage()]
    assert len(said) == 2
    assert said[1].startswith(f"the broker at {bus.link.where} stores again, after ")
    assert not bus.link.refusals.full


async def test_who_stops_waiting_is_not_waited_for(bus: Bus, filler: Filler) -> None:
    await filler.fill()
    publish = asyncio.create_task(bus.publish(SAMPLES, closed(1), ticket=1))
    await asyncio.sleep(0.5)
    assert bus.link.refusals.full
    publish.cancel()
    await asyncio.gather(publish, return_exceptions=True)
    assert not bus.link.refusals.full
