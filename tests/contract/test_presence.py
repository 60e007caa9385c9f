"""Presence against a real server: who comes, changes, says farewell, expires, and who is not to
blame for our own stall.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import uvloop
from waits import LONG_S, until

from broker.contract import codec, wire
from broker.contract.streams import MEMBERS, PRESENCE, SAMPLES, TICKETS
from broker.jetstream.bus import Bus
from broker.nats.client import Msg
from broker.runtime.announce import Announcer
from broker.runtime.presence import Roster, census
from broker.runtime.vouching import PresenceSigner
from broker.server.private_server import BrokerServer


class Process:
    """What a process says about itself, changeable."""

    def __init__(self, role: str, process_id: str) -> None:
        self.presence = wire.Presence(role=role, id=process_id, host="here", pid=1, state="serving")

    def describe(self) -> wire.Presence:
        return self.presence

    def change(self, **fields: object) -> None:
        self.presence = msgspec.structs.replace(self.presence, **fields)


@pytest.fixture
async def roster(bus: Bus) -> AsyncIterator[Roster]:
    watching = Roster(bus, ttl_s=2.0)
    await watching.start()
    yield watching
    await watching.close()


async def beat(bus: Bus, presence: wire.Presence) -> None:
    """As an Announcer does each second."""
    await bus.last_seq(SAMPLES)  # a round trip: subscriptions made before are there
    await bus.link.send(
        PRESENCE.subject(bus.run, f"{presence.role}.{presence.id}"),
        codec.encode(PresenceSigner(bus).signed(presence)),
    )


async def until_alive(roster: Roster, role: str, ids: list[str], within_s: float = LONG_S) -> None:
    async with asyncio.timeout(within_s):
        while [presence.id for presence in roster.alive(role)] != ids:
            await roster.changed(1.0)


async def test_processes_come_change_and_say_farewell(bus: Bus) -> None:
    """By events alone: nobody is announced a second time, and nobody expires."""
    roster = Roster(bus, ttl_s=2 * LONG_S)
    await roster.start()
    first, second = Process("rollout", "r2"), Process("rollout", "r1")
    announcers = [
        Announcer(bus, process.describe, every_s=2 * LONG_S)
        for process in (first, second, Process("envhub", "e1"))
    ]
    for announcer in announcers:
        await announcer.start()
    await until_alive(roster, "rollout", ["r1", "r2"])
    await until_alive(roster, "envhub", ["e1"])
    first.change(policy_version=3)
    announcers[0].poke()
    async with asyncio.timeout(LONG_S):
        while (found := roster.get("r2")) is None or found.policy_version != 3:
            await roster.changed(1.0)
    await announcers[0].close()
    await until_alive(roster, "rollout", ["r1"])
    assert roster.get("r2") is None
    for announcer in announcers[1:]:
        await announcer.close()
    await roster.close()


async def test_who_falls_silent_expires(bus: Bus, roster: Roster) -> None:
    await beat(bus, Process("rollout", "r1").presence)
    await until_alive(roster, "rollout", ["r1"])
    started = time.monotonic()
    await until_alive(roster, "rollout", [])
    assert time.monotonic() - started > 1.0


async def test_who_repeats_itself_lives_on_though_nothing_changes(bus: Bus, roster: Roster) -> None:
    announcer = Announcer(bus, Process("rollout", "r1").describe, every_s=0.5)
    await announcer.start()
    await until_alive(roster, "rollout", ["r1"])
    deadline = time.monotonic() + 3.5
    while time.monotonic() < deadline:
        assert [presence.id for presence in roster.alive("rollout")] == ["r1"]
        await asyncio.sleep(0.1)
    await announcer.close()


async def test_our_own_stall_kills_nobody(bus: Bus, roster: Roster) -> None:
    await beat(bus, Process("rollout", "r1").presence)
    await until_alive(roster, "rollout", ["r1"])
    time.sleep(3.0)  # noqa: ASYNC251 - the point of the test
    await asyncio.sleep(0.3)
    assert [presence.id for presence in roster.alive("rollout")] == ["r1"]


async def test_other_runs_are_not_seen(bus: Bus, roster: Roster) -> None:
    await bus.link.send(
        PRESENCE.subject(f"{bus.run}x", "rollout.stranger"),
        codec.encode(Process("rollout", "stranger").presence),
    )
    await beat(bus, Process("rollout", "r1").presence)
    await until_alive(roster, "rollout", ["r1"])
    assert roster.get("stranger") is None


async def test_a_role_that_is_not_asked_for_costs_no_message(bus: Bus) -> None:
    roster = Roster(bus, beats=("rollout",), members=("envhub",))
    await roster.start()
    processes = [
        Process(role, f"{role}-1") for role in ("rollout", "envhub", "rewardhub", "learner")
    ]
    announcers = [Announcer(bus, process.describe, every_s=0.1) for process in processes]
    for announcer in announcers:
        await announcer.start()
    await until_alive(roster, "rollout", ["rollout-1"])
    await until_alive(roster, "envhub", ["envhub-1"])
    assert (roster.alive("rewardhub"), roster.alive("learner")) == ([], [])
    # nobody decides on that, so it is not told to those who follow members only
    processes[1].change(running=5)
    processes[0].change(running=5)
    async with asyncio.timeout(LONG_S):
        while (found := roster.get("rollout-1")) is None or found.running != 5:
            await roster.changed(1.0)
    hub = roster.get("envhub-1")
    assert hub is not None
    assert hub.running == 0
    processes[1].change(problem="no worker starts here")  # this they do decide on
    async with asyncio.timeout(LONG_S):
        while (hub := roster.get("envhub-1")) is None or not hub.problem:
            await roster.changed(1.0)
    for announcer in announcers:
        await announcer.close()
    await until_alive(roster, "envhub", [])
    await roster.close()


async def test_members_are_known_to_who_comes_later(bus: Bus) -> None:
    announcers = [
        Announcer(bus, Process("envhub", f"e{n}").describe, every_s=LONG_S) for n in range(300)
    ]
    await asyncio.gather(*(announcer.start() for announcer in announcers))
    await announcers[0].close()
    roster = Roster(bus, beats=(), members=("envhub",))
    await roster.start()
    assert len(roster.alive("envhub")) == 299
    await roster.close()
    for announcer in announcers[1:]:
        await announcer.close()


async def test_single_processes_can_be_followed(bus: Bus) -> None:
    roster = Roster(bus, beats=())
    await roster.start()
    announcers = [
        Announcer(bus, Process("rollout", f"r{n}").describe, every_s=0.1) for n in range(4)
    ]
    for announcer in announcers:
        await announcer.start()
    await roster.follow("rollout", {"r1", "r3"})
    await until_alive(roster, "rollout", ["r1", "r3"])
    await roster.follow("rollout", {"r3", "r0"})
    await until_alive(roster, "rollout", ["r0", "r3"])
    for announcer in announcers:
        await announcer.close()
    await roster.close()


async def test_the_entry_is_put_again_before_it_expires(bus: Bus) -> None:
    bucket = bus.key_value(MEMBERS)
    announcer = Announcer(bus, Process("rollout", "r1").describe, refresh_s=0.3)
    await announcer.start()
    found = await bucket.get(f"{bus.run}.rollout.r1")
    assert found is not None
    async with asyncio.timeout(LONG_S):
        while (newer := await bucket.get(f"{bus.run}.rollout.r1")) is None or newer[1] <= found[  # noqa: ASYNC110
            1
        ] + 1:
            await asyncio.sleep(0.05)
    await announcer.close()
    assert await bucket.get(f"{bus.run}.rollout.r1") is None


async def test_what_does_not_change_is_beaten_half_as_often(bus: Bus) -> None:
    beats: list[int] = []

    async def count(message: Msg) -> None:
        found = codec.decode(message.data, wire.Presence)
        assert isinstance(found, wire.Presence)
        beats.append(found.running)

    subscribed = await bus.link.subscribe(PRESENCE.all_subjects(bus.run), count)
    process = Process("rollout", "r1")
    announcer = Announcer(bus, process.describe, every_s=0.1)
    await announcer.start()
    await asyncio.sleep(2.05)
    assert 4 <= len(beats) <= 12
    process.change(running=1)
    await until(lambda: 1 in beats)
    await announcer.close()
    await subscribed.close()


async def test_a_census_counts_who_is_heard_and_waits_no_longer_than_needed(bus: Bus) -> None:
    announcers = [
        Announcer(bus, Process(role, f"{role}-1").describe) for role in ("rollout", "envhub")
    ]
    for announcer in announcers:
        await announcer.start()
    assert [one.id for one in await census(bus, bus.run, LONG_S)] == ["envhub-1", "rollout-1"]
    bucket = bus.key_value(MEMBERS)
    await bucket.put(f"{bus.run}.envhub.killed", Process("envhub", "killed").presence)
    started = time.monotonic()
    assert [one.id for one in await census(bus, bus.run, 2.5)] == ["envhub-1", "rollout-1"]
    assert time.monotonic() - started > 2.0
    for announcer in announcers:
        await announcer.close()


async def test_changed_returns_after_its_timeout(roster: Roster) -> None:
    started = time.monotonic()
    await roster.changed(0.2)
    assert time.monotonic() - started > 0.15


async def test_members_come_back_after_a_broker_that_is_restarted(tmp_path: Path) -> None:
    """Their bucket is in memory, so the restart ends it."""
    server = BrokerServer(str(tmp_path))
    server.start()
    port = int(server.url.rpartition(":")[2])
    bus = await Bus.connect(server.url, "demo", name="x", deadline_s=60)
    announcer, roster = (
        Announcer(bus, Process("envhub", "e1").describe),
        Roster(bus, beats=(), members=("envhub",)),
    )
    await announcer.start()
    await roster.start()
    await until_alive(roster, "envhub", ["e1"])
    os.kill(server.pid, signal.SIGKILL)
    server.stop()
    server = BrokerServer(str(tmp_path), port=port)
    server.start()
    other = await Bus.connect(server.url, "demo", name="y", deadline_s=60)
    late = Roster(other, beats=(), members=("envhub",))
    await late.start()
    started = time.monotonic()
    await until_alive(late, "envhub", ["e1"])
    # and not only when the entry would have been put again
    assert time.monotonic() - started < 15.0
    for one in (late, roster, announcer):
        await one.close()
    await other.close()
    await bus.close()
    server.stop()


async def test_nobody_dies_of_a_broker_that_is_restarted(tmp_path: Path) -> None:
    server = BrokerServer(str(tmp_path))
    server.start()
    port = int(server.url.rpartition(":")[2])
    bus = await Bus.connect(server.url, "demo", name="x", deadline_s=60)
    announcer, roster = (
        Announcer(bus, Process("rollout", "r1").describe, every_s=0.5),
        Roster(bus, ttl_s=2.0),
    )
    await announcer.start()
    await roster.start()
    await until_alive(roster, "rollout", ["r1"])
    os.kill(server.pid, signal.SIGKILL)
    server.stop()
    gone = time.monotonic() + 3.0
    while time.monotonic() < gone:
        assert [presence.id for presence in roster.alive("rollout")] == ["r1"]
        await asyncio.sleep(0.1)
    server = BrokerServer(str(tmp_path), port=port)
    server.start()
    back = time.monotonic() + 4.0
    while time.monotonic() < back:
        assert [presence.id for presence in roster.alive("rollout")] == ["r1"]
        await asyncio.sleep(0.1)
    await roster.close()
    await announcer.close()
    await bus.close()
    server.stop()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_leaving_while_the_broker_is_away_takes_no_time(
    number: signal.Signals, tmp_path: Path
) -> None:
    """On uvloop, as every process runs; its sockets fail in ways of their own."""

    async def leave(server: BrokerServer) -> float:
        bus = await Bus.connect(server.url, "demo", name="x", deadline_s=60)
        await bus.ensure_streams()
        queue = await bus.work_queue(TICKETS, "lake")
        announcer, roster = Announcer(bus, Process("rollout", "r1").describe), Roster(bus)
        await announcer.start()
        await roster.start()
        fetching = asyncio.create_task(queue.fetch(1, 60.0))
        await asyncio.sleep(0.3)
        os.kill(server.pid, number)
        await asyncio.sleep(0.7)
        started = time.monotonic()
        await roster.close()
        await announcer.close()
        fetching.cancel()
        await asyncio.gather(fetching, return_exceptions=True)
        await bus.close()
        return time.monotonic() - started

    with BrokerServer(str(tmp_path)) as server:
        try:
            assert uvloop.run(leave(server)) < 30.0
        finally:
            if number == signal.SIGSTOP:
                os.kill(server.pid, signal.SIGCONT)
