"""A broker that comes back with an older store, as after a power loss, and grows beyond what was
read.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from waits import LONG_S, until

from bench.support.fleet import free_port
from broker.contract import wire
from broker.contract.examples import EXAMPLES
from broker.contract.streams import CONTROL, SAMPLES, WEIGHTS
from broker.errors import LostState
from broker.jetstream import bus as jetstream
from broker.jetstream import kv, log_reader
from broker.jetstream.api import find_message, stream_bounds, unix_ns
from broker.jetstream.bus import Bus
from broker.server.private_server import BrokerServer


class Restarts:
    """A nats-server of one address whose store can be put back to an earlier state."""

    def __init__(self, folder: Path) -> None:
        self._store, self._older, self._port = folder / "store", folder / "older", free_port()
        self._begin()

    def _begin(self) -> None:
        self.server = BrokerServer(str(self._store), port=self._port)
        self.server.start()

    def restart(self, *, with_older: bool) -> None:
        """Keep a copy of the store, or come back with the copy."""
        self.server.stop()
        if with_older:
            shutil.rmtree(self._store)
        source, target = (self._older, self._store) if with_older else (self._store, self._older)
        shutil.copytree(source, target)
        self._begin()


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Restarts]:
    made = await asyncio.to_thread(Restarts, tmp_path)
    yield made
    await asyncio.to_thread(made.server.stop)


async def connected(broker: Restarts, name: str) -> Bus:
    bus = await Bus.connect(broker.server.url, "demo", name=name, deadline_s=LONG_S)
    await bus.ensure_streams()
    return bus


def closed(ticket: int) -> wire.Closed:
    return wire.Closed(ticket=ticket, domain="lake", reason="deadline", detail="", by="hub")


async def test_reader_notices_another_record_at_its_place(
    broker: Restarts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hubs are back before the reader, and store more records than were lost: the same closings, in
    fact.
    """
    reader, hub = await connected(broker, "learner"), await connected(broker, "hub")
    may_attach, seen = asyncio.Event(), list[int]()
    may_attach.set()

    async def bounds_in_time(link: Any, name: str, **options: Any) -> tuple[int, int]:
        if link is reader.link:
            await may_attach.wait()
        return await stream_bounds(link, name, **options)

    monkeypatch.setattr(jetstream, "stream_bounds", bounds_in_time)
    monkeypatch.setattr(log_reader, "stream_bounds", bounds_in_time)

    async def read() -> None:
        async with aclosing(reader.read_log(SAMPLES, 1)) as records:
            async for record in records:
                seen.append(record.seq)

    reading = asyncio.create_task(read())
    for ticket in range(1, 6):
        await hub.publish(SAMPLES, closed(ticket), ticket=ticket)
    await until(lambda: len(seen) == 5)
    await asyncio.to_thread(broker.restart, with_older=False)
    for ticket in range(6, 9):
        await hub.publish(SAMPLES, closed(ticket), ticket=ticket)
    await until(lambda: len(seen) == 8)
    may_attach.clear()
    await asyncio.to_thread(broker.restart, with_older=True)
    for ticket in range(6, 11):  # records 6 to 10 again
        await hub.publish(SAMPLES, closed(ticket), ticket=ticket)
    may_attach.set()
    with pytest.raises(
        LostState, match="holds another record 8 than the one that was read; the broker's store was"
    ):
        async with asyncio.timeout(LONG_S):
            await reading
    assert seen == list(range(1, 9))
    for bus in (reader, hub):
        await bus.close()


async def test_restarted_reader_goes_on_with_its_own_store(broker: Restarts) -> None:
    bus = await connected(broker, "learner")
    async with asyncio.timeout(LONG_S), aclosing(bus.read_log(SAMPLES, 1)) as records:
        for ticket in range(1, 4):
            await bus.publish(SAMPLES, closed(ticket), ticket=ticket)
            assert (await anext(records)).seq == ticket
            await asyncio.to_thread(broker.restart, with_older=False) if ticket == 2 else None
        await bus.trim(SAMPLES, 4)  # nothing is left to compare with
        log_name = SAMPLES.stream_name(bus.run)
        assert await find_message(bus.link, log_name, seq=3) is None
    await bus.close()


async def test_last_value_of_an_older_store_is_seen(
    broker: Restarts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sequence is that of a lost one; the offers and the desired state are put before the
    watchers are back.
    """
    learner, server = await connected(broker, "learner"), await connected(broker, "server")
    may_look = asyncio.Event()
    may_look.set()
    for module, name in ((jetstream, "find_message"), (kv, "find_message")):
        asked = getattr(module, name)

        async def in_time(link: Any, *arguments: Any, asked: Any = asked, **options: Any) -> Any:
            if link is server.link:
                await may_look.wait()
            return await asked(link, *arguments, **options)

        monkeypatch.setattr(module, name, in_time)
    example = EXAMPLES[wire.WeightsOffer]

    async def offer(version: int) -> None:
        await learner.publish(WEIGHTS, msgspec.structs.replace(example, version=version))
        desired = wire.DesiredState(state="running", reason=str(version))
        await learner.key_value(CONTROL).put(learner.run, desired)

    versions, states = list[int](), list[str]()

    async def watch_offers() -> None:
        async with aclosing(server.watch_last(WEIGHTS)) as offers:
            async for message in offers:
                versions.append(message.version)  # type: ignore[attr-defined]

    async def watch_state() -> None:
        async with aclosing(server.key_value(CONTROL).watch(server.run)) as found:
            async for message, _ in found:
                states.append(message.reason if isinstance(message, wire.DesiredState) else "")

    await offer(1)
    watching = [asyncio.create_task(watch_offers()), asyncio.create_task(watch_state())]
    await until(lambda: versions == [1] and states == ["1"])
    await asyncio.to_thread(broker.restart, with_older=False)
    await offer(2)
    await until(lambda: versions[-1] == 2 and states[-1] == "2")
    may_look.clear()
    await asyncio.to_thread(broker.restart, with_older=True)
    await offer(3)
    may_look.set()
    await until(lambda: versions[-1] == 3 and states[-1] == "3")
    for task in watching:
        task.cancel()
    await asyncio.gather(*watching, return_exceptions=True)
    for bus in (learner, server):
        await bus.close()


def test_times_of_the_broker() -> None:
    assert unix_ns("1970-01-01T00:00:01Z") == 10**9
    assert unix_ns("2026-11-26T19:11:33.12Z") == 1_795_720_293_120_000_000
    assert unix_ns("2026-11-26T19:11:33.123456789Z") == 1_795_720_293_123_456_789
