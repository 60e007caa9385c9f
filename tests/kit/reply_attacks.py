"""Attempts to make the broker, or a process, publish where an identity may not: each kind of reply,
from each role.

Every attempt names a forbidden subject as the place of a reply. ``changes`` tells whether one of
them got there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

from broker_strangers import Stranger, stranger

from broker.contract import codec, wire
from broker.contract.examples import EXAMPLES
from broker.contract.permissions import JOINING, OBSERVER
from broker.contract.streams import (
    CONTROL,
    EPISODES,
    EVALS,
    GENERATE,
    RUNS,
    SAMPLES,
    SCORES,
    TICKETS,
    WEIGHTS,
    WEIGHTSYNC,
    Stream,
)
from broker.jetstream.bus import Bus
from broker.jetstream.core_messages import answer_requests
from broker.nats.nats_errors import NoStream

ATTACKERS: Final = (*JOINING, OBSERVER)
WATCHED: Final = (TICKETS, EPISODES, SAMPLES, EVALS, WEIGHTS, RUNS, CONTROL)
QUEUES: Final = {"envhub": f"{TICKETS.name}.lake", "rewardhub": f"{EPISODES.name}.default"}
STORED: Final = {"rollout": "$KV.rl_{run}_devices.{run}.x", "envhub": "$KV.rl_{run}_attempts.{run}.t.x",
                 "rewardhub": "rl.{run}.parts.train.7.x.0", OBSERVER: "rl.{run}.dead.x"}  # fmt: skip
BUCKETS: Final = {"rollout": "KV_rl_{run}_devices", "envhub": "KV_rl_{run}_attempts", "rewardhub": "rl_{run}_parts",
                  OBSERVER: "KV_rl_{run}_runs"}  # fmt: skip
ANSWERED: Final = {"rollout": (WEIGHTSYNC, "1", "learner"), "envhub": (GENERATE, "s1", "rollout"),
                   "rewardhub": (SCORES, "default", "rewardhub"), OBSERVER: (GENERATE, "s1", "rollout")}  # fmt: skip
Attack = Callable[[Stranger, Bus, str, str], Awaitable[None]]


def targets(role: str, run: str, *, is_own: bool) -> list[str]:
    """Return the subjects that would do harm, of the attacker's run or another."""
    forged = [
        f"rl.{run}.tickets.lake",
        f"rl.{run}.weights",
        f"$KV.rl_{run}_runs.{run}",
        f"$KV.rl_{run}_control.{run}",
    ]
    forged += (
        []
        if is_own and role in ("envhub", "rewardhub")
        else [f"rl.{run}.samples", f"rl.{run}.episodes.default"]
    )
    api = [
        f"STREAM.PURGE.rl_{run}_samples",
        f"STREAM.DELETE.rl_{run}_evals",
        f"STREAM.PURGE.rl_{run}_tickets",
    ]
    return [*forged, *(f"$JS.API.{one}" for one in api), *(f"RLJS.{one}" for one in api)]


async def _store(one: Stranger, role: str, run: str, body: bytes) -> None:
    await one.client.publish(STORED[role].format(run=run), body)


async def empty_pull(one: Stranger, bus: Bus, role: str, target: str) -> None:
    """A pull that finds nothing ends with an empty reply."""
    name, _, key = QUEUES.get(role, "").partition(".")
    stream = f"rl_{bus.run}_{name}" if name else BUCKETS[role].format(run=bus.run)
    await one.client.publish(
        f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{key or 'x'}", b'{"batch":9,"no_wait":true}', target
    )


async def ack_next(one: Stranger, bus: Bus, role: str, target: str) -> None:
    """An acknowledgement that asks for the next message."""
    name, _, key = QUEUES.get(role, "tickets.lake").partition(".")
    # a message that it does not hold
    place = f"$JS.ACK.rl_{bus.run}_{name}.{key}.1.999.999.1700000000000000000.0"
    await one.client.publish(place, b'+NXT {"batch":9,"no_wait":true}', target)


async def pull(one: Stranger, bus: Bus, role: str, target: str) -> None:
    """A pull whose messages go to the target, of a consumer of the attacker's if it may have one."""
    await _store(one, role, bus.run, codec.encode(EXAMPLES[wire.Closed]))
    stream = BUCKETS[role].format(run=bus.run)
    config = {"ack_policy": "none", "deliver_policy": "all", "mem_storage": True, "num_replicas": 1}
    made = await one.ask(
        f"$JS.API.CONSUMER.CREATE.{stream}", {"stream_name": stream, "config": config}
    )
    name = (made or {}).get("name", "x")
    await one.client.publish(
        f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{name}", b'{"batch":9,"no_wait":true}', target
    )


async def push(one: Stranger, bus: Bus, role: str, target: str, **more: Any) -> None:
    """A consumer that pushes its messages to the target."""
    await _store(one, role, bus.run, codec.encode(EXAMPLES[wire.Closed]))
    stream = BUCKETS[role].format(run=bus.run)
    config = {
        "deliver_subject": target,
        "ack_policy": "none",
        "deliver_policy": "all",
        "mem_storage": True,
    }
    await one.ask(
        f"$JS.API.CONSUMER.CREATE.{stream}", {"stream_name": stream, "config": config | more}
    )


async def flow_control(one: Stranger, bus: Bus, role: str, target: str) -> None:
    """A consumer that pushes its heartbeats and flow control to the target."""
    await push(one, bus, role, target, flow_control=True, idle_heartbeat=100_000_000)


async def direct_get(one: Stranger, bus: Bus, role: str, target: str) -> None:
    """A stored message that is sent as it is."""
    place, stream = STORED[role].format(run=bus.run), BUCKETS[role].format(run=bus.run)
    await _store(one, role, bus.run, codec.encode(EXAMPLES[wire.Closed]))
    await one.client.publish(f"$JS.API.DIRECT.GET.{stream}.{place}", b"", target)


async def empty_direct_get(one: Stranger, bus: Bus, role: str, target: str) -> None:
    """A message that is not stored has an empty reply."""
    await one.client.publish(
        f"$JS.API.DIRECT.GET.{BUCKETS[role].format(run=bus.run)}.nothing", b"", target
    )


async def json_reply(one: Stranger, bus: Bus, role: str, target: str) -> None:
    """The description of a stream, and a stored message as JSON."""
    stream = BUCKETS[role].format(run=bus.run)
    await one.client.publish(f"$JS.API.STREAM.INFO.{stream}", b"", target)
    await one.client.publish(f"$JS.API.STREAM.MSG.GET.{stream}", b'{"seq": 1}', target)
    await one.client.publish("$JS.API.INFO", b"", target)


async def publish_ack(one: Stranger, bus: Bus, role: str, target: str) -> None:
    """The confirmation of a stored message."""
    await one.client.publish(STORED[role].format(run=bus.run), b"x", target)
    await one.client.publish(f"rl.{bus.run}.dead.x", b"x", target)


async def self_grant(one: Stranger, bus: Bus, role: str, target: str) -> None:
    """A message to itself whose reply subject is the target, which may then be published to."""
    box = f"{one.inbox}.self"
    arrived = asyncio.Event()

    async def note(_: object) -> None:
        arrived.set()

    subscribed = await one.client.subscribe(box, cb=note)
    await one.client.publish(box, b"x", target)
    await one.client.flush()
    async with asyncio.timeout(10):
        await arrived.wait()
    await subscribed.unsubscribe()
    await one.client.publish(
        target, codec.encode(EXAMPLES[wire.Closed]) if target.startswith(("rl", "$KV")) else b""
    )


async def answered(one: Stranger, bus: Bus, role: str, target: str) -> None:
    """The reply of an honest process to a request."""
    stream, key, _ = ANSWERED[role]
    question = next(
        message for message in stream.messages if not message.__name__.endswith("Reply")
    )
    await one.client.publish(stream.subject(bus.run, key), codec.encode(EXAMPLES[question]), target)


KINDS: Final[dict[str, Attack]] = {
    "empty pull": empty_pull, "pull": pull, "push": push, "flow control": flow_control, "direct get": direct_get,
    "empty direct get": empty_direct_get, "json": json_reply, "publish ack": publish_ack, "self grant": self_grant,
    "answer": answered, "ack next": ack_next,
}  # fmt: skip


async def state_of(bus: Bus, streams: tuple[Stream, ...] = WATCHED) -> dict[str, Any]:
    """Return what the streams of a run hold, as the operator sees it."""
    found: dict[str, Any] = {}
    for stream in streams:
        try:
            state = (await bus.info(stream))["state"]
            found[stream.name] = tuple(
                state[name] for name in ("messages", "first_seq", "last_seq")
            )
        except NoStream:
            found[stream.name] = "gone"
    return found


async def harm_done(
    url: str, role: str, kind: str, own: Bus, victim: Bus, responder: Bus | None = None
) -> set[str]:
    """Try one kind of reply from one role of ``own``'s run with every target of ``victim``'s;
    return what changed.

    Args:
        own, victim: operators of both runs, which may be the same.
        responder: a process that answers the requests that this role sends.
    """
    before = await state_of(victim)
    subscribed = None
    if responder is not None:
        stream, key, _ = ANSWERED[role]
        reply = EXAMPLES[stream.messages[-1]]

        async def handle(_: wire.Message) -> wire.Message:
            return reply

        subscribed = await answer_requests(responder, stream, key, handle)
        await responder.link.overdue(1.0)
    async with stranger(url, role, own.run) as one:
        for target in targets(role, victim.run, is_own=own is victim):
            await KINDS[kind](one, own, role, target)
        await one.client.flush()
        await asyncio.sleep(0.5)
    if subscribed is not None:
        await subscribed.close()
    after = await state_of(victim)
    return {name for name in after if after[name] != before[name]}
