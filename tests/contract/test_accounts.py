"""Every operation of every role, from the account of that role on a real nats-server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import msgspec
import pytest
from waits import LONG_S, until

from broker.contract import codec, wire
from broker.contract.examples import EXAMPLES
from broker.contract.permissions import JOINING, OBSERVER
from broker.contract.streams import (
    ATTEMPTS,
    CONTROL,
    DEVICES,
    EPISODES,
    GENERATE,
    MEMBERS,
    PARTS,
    PRESENCE,
    REQUESTS,
    RERUNS,
    RUNS,
    SAMPLES,
    SCORES,
    TICKETS,
    WEIGHTS,
    WEIGHTSYNC,
    Stream,
)
from broker.errors import RequestFailed, UserError
from broker.identity.login import find_login
from broker.jetstream.bus import Bus
from broker.jetstream.core_messages import (
    answer_requests,
    publish_metrics,
    send_request,
    watch_metrics,
)
from broker.jetstream.parts import GroupParts
from broker.nats.client import Msg

Buses = dict[str, Bus]
EVERYONE = ("learner", *JOINING, OBSERVER, "operator")


@pytest.fixture
async def buses(broker_url: str, bus: Bus) -> AsyncIterator[Buses]:
    """A connection of each role to a run whose queues exist."""
    await bus.ensure_consumers(TICKETS, ["lake"])
    await bus.ensure_consumers(EPISODES, ["default"])
    made = {}
    for role in EVERYONE:
        login = find_login(broker_url, role, bus.run)
        made[role] = await Bus.connect(
            broker_url, bus.run, name=role, role=role, login=login, deadline_s=60
        )
    for role in JOINING:
        await made[role].ensure_streams()
    yield made
    for each in made.values():
        await each.close()


async def test_work_is_pulled_marked_handed_back_and_acknowledged(buses: Buses) -> None:
    queue = await buses["envhub"].work_queue(TICKETS, "lake")
    pulling = asyncio.create_task(queue.fetch(1, LONG_S))
    # while the pull waits
    await buses["learner"].publish(TICKETS, EXAMPLES[wire.Ticket], key="lake")
    (first,) = await pulling
    await first.nak()
    (again,) = await queue.fetch(1, LONG_S)
    assert (again.seq, again.num_delivered) == (first.seq, 2)
    assert await buses["envhub"].publish(SAMPLES, EXAMPLES[wire.Closed], ticket=1) == 1
    await again.ack()
    assert await buses["learner"].depth(TICKETS) == {}
    assert await queue.fetch(1, 0.1) == []


async def test_marks_keep_a_delivery(buses: Buses) -> None:
    await buses["learner"].publish(TICKETS, EXAMPLES[wire.Ticket], key="lake")
    queue = await buses["envhub"].work_queue(TICKETS, "lake")
    (delivery,) = await queue.fetch(1, LONG_S)
    assert await queue.fetch(1, 8.0) == []  # longer than the broker waits for a mark
    await delivery.ack()
    assert await buses["learner"].depth(TICKETS) == {}


async def test_a_large_group_travels_in_parts_to_the_learner(buses: Buses) -> None:
    hub, rewards, learner = buses["envhub"], buses["rewardhub"], buses["learner"]
    group = msgspec.structs.replace(EXAMPLES[wire.Group], ticket=7)
    parts = GroupParts(hub.link, lambda: hub.run)
    parted = await parts.put(group, codec.encode(group))
    for reader in (rewards, learner):
        found, error, _ = await GroupParts(reader.link, lambda: hub.run).load(parted)
        assert (error, found) == ("", group)
    await learner.trim_parts(SAMPLES, lambda _: False)
    assert (await learner.info(PARTS))["state"]["messages"] == 0


async def test_the_learner_reads_what_hubs_log(buses: Buses) -> None:
    await buses["envhub"].publish(SAMPLES, EXAMPLES[wire.Closed], ticket=1)
    await buses["rewardhub"].publish(SAMPLES, EXAMPLES[wire.Group], ticket=2)
    seen = []
    async with asyncio.timeout(LONG_S), aclosing(buses["learner"].read_log(SAMPLES, 1)) as records:
        async for record in records:
            seen.append(record.ticket)
            if len(seen) == 2:
                break
    assert seen == [1, 2]


@pytest.mark.parametrize("role", [*JOINING, OBSERVER])
async def test_a_change_of_the_desired_state_is_seen_at_once(buses: Buses, role: str) -> None:
    states: list[str] = []

    async def watch() -> None:
        async for message, _ in buses[role].key_value(CONTROL).watch(buses[role].run):
            assert isinstance(message, wire.DesiredState)
            states.append(message.state)

    watching = asyncio.create_task(watch())
    for state in ("running", "paused", "draining"):
        writer = buses["operator" if state == "paused" else "learner"]
        await writer.key_value(CONTROL).put(writer.run, wire.DesiredState(state=state))
        # a lost message would be noticed by the next read, 15 s later
        async with asyncio.timeout(5):
            await until(lambda wanted=state: states[-1:] == [wanted])  # type: ignore[misc]
    watching.cancel()


async def test_offers_reach_a_server_at_once(buses: Buses) -> None:
    versions: list[int] = []

    async def watch() -> None:
        async for offer in buses["rollout"].watch_last(WEIGHTS):
            assert isinstance(offer, wire.WeightsOffer)
            versions.append(offer.version)

    watching = asyncio.create_task(watch())
    for version in (1, 2, 3):
        await buses["learner"].publish(
            WEIGHTS, msgspec.structs.replace(EXAMPLES[wire.WeightsOffer], version=version)
        )
        async with asyncio.timeout(5):
            await until(lambda wanted=version: versions[-1:] == [wanted])  # type: ignore[misc]
    assert versions == [1, 2, 3]
    watching.cancel()


async def test_values_are_swapped_and_listed(buses: Buses) -> None:
    bucket = buses["envhub"].key_value(ATTEMPTS)
    key, message = f"{buses['envhub'].run}.tickets.9", EXAMPLES[wire.Attempt]
    first = await bucket.create(key, message)
    assert first is not None
    assert await bucket.create(key, message) is None
    second = await bucket.update(key, message, first)
    assert second is not None
    assert await bucket.update(key, message, first) is None
    assert await bucket.values(f"{buses['envhub'].run}.tickets") == {key: message}


async def test_members_are_heard_once_by_every_reader(buses: Buses) -> None:
    heard: dict[str, list[str]] = {}
    run = buses["envhub"].run
    for role in ("envhub", "learner", "operator", OBSERVER):
        keys = heard[role] = []
        await buses[role].key_value(MEMBERS).tap(run, lambda key, _, keys=keys: keys.append(key))  # type: ignore[misc]
        await buses[role].link.overdue(1.0)
    wanted = sorted(f"{run}.{role}.x" for role in ("learner", *JOINING))
    for role in ("learner", *JOINING):
        await buses[role].key_value(MEMBERS).put(f"{run}.{role}.x", EXAMPLES[wire.Presence])
    await until(lambda: all(len(keys) >= len(wanted) for keys in heard.values()))
    await asyncio.gather(*(each.link.overdue(1.0) for each in buses.values()))
    assert {role: sorted(keys) for role, keys in heard.items()} == dict.fromkeys(heard, wanted)
    for role in ("envhub", "learner", "operator", OBSERVER):
        assert sorted(await buses[role].key_value(MEMBERS).values(run)) == wanted


async def test_the_operator_speaks_for_every_role(buses: Buses) -> None:
    heard: list[str] = []
    run = buses["envhub"].run

    async def note(message: Msg) -> None:
        heard.append(message.subject)

    await buses["envhub"].link.subscribe(PRESENCE.all_subjects(run), note)
    await buses["envhub"].key_value(MEMBERS).tap(run, lambda key, _: heard.append(key))
    await buses["envhub"].link.overdue(1.0)
    data = codec.encode(EXAMPLES[wire.Presence])
    for role in ("operator", "rollout"):
        await buses[role].link.send(PRESENCE.subject(run, "rollout.s1"), data)
        await buses[role].key_value(MEMBERS).put(f"{run}.rollout.s1", EXAMPLES[wire.Presence])
    await until(lambda: len(heard) >= 4)
    await asyncio.gather(*(each.link.overdue(1.0) for each in buses.values()))
    assert sorted(heard) == sorted([PRESENCE.subject(run, "rollout.s1"), f"{run}.rollout.s1"] * 2)


async def test_devices_are_leased_between_learner_and_servers(buses: Buses) -> None:
    heard: dict[str, list[str]] = {"learner": [], "rollout": []}
    run = buses["rollout"].run
    for role, keys in heard.items():
        await buses[role].key_value(DEVICES).tap(run, lambda key, _, keys=keys: keys.append(key))  # type: ignore[misc]
        await buses[role].link.overdue(1.0)
    for role in heard:
        assert (
            await buses[role].key_value(DEVICES).create(f"{run}.{role}", EXAMPLES[wire.DeviceLease])
            is not None
        )
    await until(lambda: len(heard["learner"]) >= 2)
    await buses["rollout"].link.overdue(1.0)
    # a subject crosses one way: servers read what the learner changed, they do not hear it
    assert {role: sorted(keys) for role, keys in heard.items()} == {
        "learner": [f"{run}.learner", f"{run}.rollout"],
        "rollout": [f"{run}.rollout"],
    }


async def test_metrics_are_heard_once_by_those_who_watch(buses: Buses) -> None:
    heard: list[tuple[str, str]] = []

    async def watch(reader: str) -> None:
        async for metrics in watch_metrics(buses[reader]):
            heard.append((reader, metrics.role))

    readers = ("operator", OBSERVER)
    watching = [asyncio.create_task(watch(reader)) for reader in readers]
    await asyncio.sleep(0)
    await asyncio.gather(*(each.link.overdue(1.0) for each in buses.values()))
    writers = ("learner", *JOINING)
    for writer in writers:
        await publish_metrics(
            buses[writer], msgspec.structs.replace(EXAMPLES[wire.Metrics], role=writer, id="x")
        )
    await until(lambda: len(heard) >= len(readers) * len(writers))
    await asyncio.gather(*(each.link.overdue(1.0) for each in buses.values()))
    assert sorted(heard) == sorted((reader, writer) for reader in readers for writer in writers)
    for task in watching:
        task.cancel()


REQUEST_PAIRS: list[tuple[Stream, str, str, str, type[wire.Message], type[wire.Message]]] = [
    (GENERATE, "envhub", "rollout", "s1", wire.GenerateRequest, wire.GenerateReply),
    (WEIGHTSYNC, "rollout", "learner", "1", wire.WeightsJoin, wire.WeightsSession),
    (GENERATE, "operator", "rollout", "s2", wire.GenerateRequest, wire.GenerateReply),
    (SCORES, "envhub", "rewardhub", "default", wire.EpisodeScoreRequest, wire.EpisodeScoreReply),
    (RERUNS, "operator", "envhub", "envhub.h1", wire.Ticket, wire.Closed),
    (RERUNS, "operator", "rewardhub", "rewardhub.r1", wire.Group, wire.Closed),
    (REQUESTS, "operator", "learner", "l1", wire.OperatorRequest, wire.OperatorReply),
]


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
@pytest.mark.parametrize(
    "pair", REQUEST_PAIRS, ids=lambda pair: f"{pair[0].name}-{pair[1]}-{pair[2]}"
)
async def test_requests_are_answered(
    buses: Buses,
    pair: tuple[Stream, str, str, str, type[wire.Message], type[wire.Message]],
    shared: bool,
) -> None:
    stream, asker, answerer, key, question, answer = pair

    async def handle(message: wire.Message) -> wire.Message:
        assert isinstance(message, question)
        return EXAMPLES[answer]

    with pytest.raises(RequestFailed, match="nothing listens"):
        await send_request(buses[asker], stream, key, EXAMPLES[question], timeout_s=5, reply=answer)
    subscribed = await answer_requests(buses[answerer], stream, key, handle, shared=shared)
    await buses[answerer].link.overdue(1.0)
    replies = [
        send_request(buses[asker], stream, key, EXAMPLES[question], timeout_s=LONG_S, reply=answer)
        for _ in range(20)
    ]
    assert await asyncio.gather(*replies) == [EXAMPLES[answer]] * 20
    await subscribed.close()


@pytest.mark.parametrize("role", JOINING)
async def test_a_refused_request_is_named_as_it_was_sent(buses: Buses, role: str) -> None:
    with pytest.raises(
        UserError,
        match=rf"does not allow a {role} of its run to publish to \$JS.API.stream.purge.rl_",
    ):
        await buses[role].trim(SAMPLES, 2)


async def test_every_role_finds_the_run(buses: Buses) -> None:
    await buses["learner"].key_value(RUNS).put(buses["learner"].run, EXAMPLES[wire.RunSpec])
    for role in EVERYONE:
        found = await buses[role].key_value(RUNS).get(buses[role].run)
        assert found is not None
        assert found[0] == EXAMPLES[wire.RunSpec]
