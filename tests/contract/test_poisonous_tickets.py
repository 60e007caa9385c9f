"""A ticket that kills the hubs that play it costs three of them and itself; its neighbours are
played.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import defaultdict
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from envhub_world import World
from waits import LONG_S, until

from broker.contract import codec, wire
from broker.contract.streams import ATTEMPTS, DEAD, SAMPLES, TICKETS
from broker.jetstream.bus import Bus, Delivery
from broker.jetstream.provision import delete_stream
from broker.runtime.announce import Announcer
from broker.system.process_identity import this_process
from envhub.tickets.assignment import assignment
from envhub.tickets.attempts import AttemptNotes
from envhub.tickets.suspicion import TicketJudgement

DEADLY = f"{Path(__file__).parents[1] / 'kit' / 'deadly_env.py'}:Deadly"
# a process of this machine whose number was given away again
GONE = f"{this_process().rsplit('/', 2)[0]}/{os.getpid()}/1"
TICKET = wire.Ticket(
    number=7,
    domain="lake",
    task_index=6,
    seed=1,
    min_version=0,
    max_staleness=1,
    group_size=1,
    min_group_size=1,
    deadline_s=60.0,
)


@pytest.fixture
async def world(bus: Bus, broker_url: str, tmp_path: Path) -> AsyncIterator[World]:
    made = World(bus, broker_url, tmp_path)
    yield made
    await made.close()


async def test_a_ticket_that_kills_hubs_is_played_alone_and_then_closed(world: World) -> None:
    await world.publish_spec(
        {"lake": {"env": DEADLY, "env_args": {"task": 1}, "max_turns": 1, "group_size": 1}}
    )
    playing: dict[str, set[str]] = defaultdict(set)  # hub -> tickets
    seen: list[tuple[str, frozenset[str]]] = []  # a hub, and what it played at the same time

    async def answer(request: wire.GenerateRequest) -> str:
        hub, ticket = request.conversation_id.split(".")[:2]
        playing[hub].add(ticket)
        if hub in ("hub1", "hub2"):
            await (
                until(lambda: len(playing[hub]) == 4)
                if ticket == "tickets-2"
                else asyncio.Event().wait()
            )
        else:
            await asyncio.sleep(0.3)  # time for another one to come, which must not
        seen.append((hub, frozenset(playing[hub])))
        playing[hub].discard(ticket)
        return "R"

    await world.server(script=lambda request, _: answer(request))
    numbers = [await world.ticket(group_size=1) for _ in range(4)]
    for name in ("hub1", "hub2", "hub3"):
        child = world.spawn("--n", "8", "--id", name)
        assert await asyncio.to_thread(child.wait, 100) == 1
    last = world.spawn("--n", "8", "--id", "hub4")
    records = {record.ticket: record for record in await world.records(4)}
    (letter,) = await world.records(1, DEAD)
    await world.settled()
    bucket = world.bus.key_value(ATTEMPTS)
    await until(lambda: _is_empty(bucket, world.bus.run))
    last.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(last.wait, 100) == 0
    assert sorted(records) == numbers
    assert (records[2].reason, records[2].by) == ("poisonous", "hub4")
    assert (
        records[2].detail
        == "3 hubs died while playing this ticket, the last one while playing nothing else"
    )
    assert {type(records[number]) for number in (1, 3, 4)} == {wire.Group}
    assert {records[number].hub for number in (1, 3, 4)} <= {"hub3", "hub4"}
    assert {len(together) for hub, together in seen if hub in ("hub3", "hub4")} == {1}, (
        "a suspect was not played alone"
    )
    assert [together for hub, together in seen if hub == "hub3"][-1] == {"tickets-2"}
    assert codec.decode(letter.data, wire.Ticket).number == 2
    assert await world.bus.last_seq(SAMPLES) == 4


async def _is_empty(bucket: Any, run: str) -> bool:
    return not await bucket.values(run)


async def test_a_hub_that_hands_back_is_not_counted_as_dead(bus: Bus) -> None:
    asked, attempts = assignment(TICKET), AttemptNotes(bus, "hub1")
    assert await attempts.judge(asked, 1) == TicketJudgement(0)
    await attempts.hand_back(asked, 0)
    assert await attempts.judge(asked, 2) == TicketJudgement(0)
    await bus.key_value(ATTEMPTS).put(
        f"{bus.run}.tickets.7", wire.Attempt(deaths=1, hub="hub2", process=GONE)
    )
    assert await attempts.judge(asked, 3) == TicketJudgement(2)
    await attempts.end(asked)
    assert await attempts.judge(asked, 4) == TicketJudgement(1)


async def test_a_suspect_that_a_living_hub_plays_is_left_to_it(bus: Bus) -> None:
    """Cut off from the broker for a while, its ticket was delivered to another hub."""
    asked, mine, others = assignment(TICKET), AttemptNotes(bus, "hub1"), AttemptNotes(bus, "hub2")
    here = wire.Presence(
        role="envhub", id="hub2", host="h", pid=os.getpid(), state="serving", process=this_process()
    )
    announcer = Announcer(bus, lambda: here, every_s=0.2)
    await announcer.start()
    await others.begin(asked, TicketJudgement(2))
    assert await mine.judge(asked, 4) is None, "took it from a hub that is alive"
    await others.hand_back(asked, 2)
    assert await mine.judge(asked, 4) == TicketJudgement(2)
    await others.begin(asked, TicketJudgement(1))
    assert await mine.judge(asked, 5) == TicketJudgement(1), (
        "a ticket that is not suspect waits for nobody"
    )
    await announcer.close()


async def test_a_suspect_that_its_hub_gave_up_is_left_to_nobody(bus: Bus) -> None:
    asked, mine, others = assignment(TICKET), AttemptNotes(bus, "hub1"), AttemptNotes(bus, "hub2")
    announcers = [
        Announcer(
            bus,
            partial(
                wire.Presence,
                "envhub",
                id=hub,
                host="h",
                pid=os.getpid(),
                state="serving",
                process=this_process(),
            ),
            every_s=0.2,
        )
        for hub in ("hub1", "hub2")
    ]
    for announcer in announcers:
        await announcer.start()
    revision = await mine.begin(asked, TicketJudgement(2))
    assert await others.judge(asked, 4) is None
    assert await mine.judge(asked, 4) == TicketJudgement(2), "left it to itself"
    await mine.withdraw(asked, 2, revision)
    assert await others.judge(asked, 5) == TicketJudgement(2)
    await others.begin(asked, TicketJudgement(2))
    await mine.withdraw(asked, 2, revision)
    assert await mine.judge(asked, 6) is None, "another hub's note was overwritten"
    for announcer in announcers:
        await announcer.close()


async def test_a_suspect_that_its_hub_abandoned_is_played_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub stood still while it played the ticket alone, and lives."""
    await world.publish_spec({"lake": {"env": "frozenlake", "max_turns": 1, "group_size": 1}})
    requests: list[str] = []

    async def answer(request: wire.GenerateRequest) -> str:
        requests.append(request.conversation_id)
        if len(requests) == 1:
            await asyncio.Event().wait()
        return "R"

    await world.server(script=lambda request, _: answer(request))
    number = await world.ticket(group_size=1)
    (delivery,) = await (await world.bus.work_queue(TICKETS, "lake")).fetch(1, LONG_S)
    bucket = world.bus.key_value(ATTEMPTS)
    key = f"{world.bus.run}.tickets.{number}"
    await bucket.put(key, wire.Attempt(deaths=1, hub="hub0", process=GONE))
    await until(lambda: delivery.is_ours)
    await delivery.nak()
    # Of the delivery during which it stood still.
    monkeypatch.setattr(
        Delivery, "has_lapsed", property(lambda held: bool(requests) and held.num_delivered == 2)
    )
    async with world.hub("--id", "hub1"):
        (group,) = (await world.groups(1)).values()
        await world.settled()

        # it goes after the ticket was acknowledged
        async def is_withdrawn() -> bool:
            return await bucket.get(key) is None

        await until(is_withdrawn)
    assert (group.hub, group.deliveries) == ("hub1", 3)


async def test_a_hub_of_another_machine_that_falls_silent_is_dead(bus: Bus) -> None:
    asked, mine = assignment(TICKET), AttemptNotes(bus, "hub1")
    there = wire.Attempt(deaths=2, hub="hub2", process="another-machine/pid:[1]/1/1", alone=True)
    await bus.key_value(ATTEMPTS).put(f"{bus.run}.tickets.7", there)
    assert await mine.judge(asked, 4) == TicketJudgement(3, poisonous=True)


async def test_notes_are_kept_anew_after_the_broker_has_lost_them(bus: Bus) -> None:
    asked, attempts = assignment(TICKET), AttemptNotes(bus, "hub1")
    await attempts.hand_back(asked, 2)
    await delete_stream(bus.link, ATTEMPTS.stream_name(bus.run))
    assert await attempts.judge(asked, 3) == TicketJudgement(1)
    await delete_stream(bus.link, ATTEMPTS.stream_name(bus.run))
    await attempts.hand_back(asked, 2)
    assert await attempts.judge(asked, 3) == TicketJudgement(2)
