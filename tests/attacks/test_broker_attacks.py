"""What neither a stranger on the same host nor a compromised process of a run can do to the broker.

Each attempt is judged by the operator's own connection, which looks at the streams before and after
it.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from broker_strangers import Stranger, is_refused, stranger
from nats.aio.client import Client

from broker.contract import codec, wire
from broker.contract.examples import EXAMPLES
from broker.contract.permissions import inbox_prefix
from broker.contract.streams import (
    CONTROL,
    EPISODES,
    EVALTICKETS,
    MEMBERS,
    RUNS,
    SAMPLES,
    STREAMS,
    TICKETS,
    WEIGHTS,
    Stream,
    StreamKind,
)  # fmt: skip
from broker.identity import signatures
from broker.identity.key_folder import BrokerUser, KeyFolder
from broker.identity.keys import Key
from broker.identity.login import find_login
from broker.jetstream.api import find_message
from broker.jetstream.bus import Bus
from broker.nats.nats_errors import NoStream
from broker.runtime.process import Stop
from learner.run_watch import EpochWatch

HUBS = ("rollout", "envhub", "rewardhub")
STORED = [one for one in STREAMS if one.kind not in (StreamKind.REQUEST, StreamKind.BEST_EFFORT)]


@pytest.fixture
async def run(bus: Bus) -> Bus:
    """A run with a ticket, a group to be scored, a sample, an offer, a RunSpec and a desired state."""
    await bus.ensure_consumers(TICKETS, ["lake"])
    await bus.ensure_consumers(EPISODES, ["default"])
    await bus.publish(TICKETS, EXAMPLES[wire.Ticket], key="lake")
    await bus.publish(EPISODES, EXAMPLES[wire.Group], key="default")
    await bus.publish(SAMPLES, EXAMPLES[wire.Closed])
    await bus.publish(WEIGHTS, EXAMPLES[wire.WeightsOffer])
    await bus.key_value(RUNS).put(bus.run, EXAMPLES[wire.RunSpec])
    await bus.key_value(CONTROL).put(bus.run, wire.DesiredState(state="running"))
    return bus


async def content(bus: Bus) -> dict[str, Any]:
    """Return what every stream of a run holds, as the operator sees it."""
    states = {}
    for stream in STORED:
        try:
            info = await bus.info(stream, {"subjects_filter": ">"})
        except NoStream:
            states[stream.name] = "gone"
            continue
        state, config = info["state"], info["config"]
        numbers = {name: state[name] for name in ("messages", "first_seq", "last_seq")}
        kept = ("subjects", "max_msgs_per_subject", "retention", "max_age", "max_bytes")
        consumers = state["consumer_count"]
        states[stream.name] = (
            numbers | {name: config.get(name) for name in kept} | {"consumers": consumers}
        )
    return states


# ------------------------------------------------------------------------------------------ without
# a key of the broker


@pytest.mark.parametrize(
    "login", ["none", "user and password", "token", "another key", "a signature of another nonce"]
)
async def test_nothing_connects_without_a_key(login: str, broker_url: str) -> None:
    key = Key.generate()
    options: dict[str, Any] = {
        "none": {},
        "user and password": {"user": "operator", "password": "operator"},
        "token": {"token": "operator"},
        "another key": {"nkeys_seed_str": key.seed},
        "a signature of another nonce": {
            "nkeys_seed_str": key.seed,
            "signature_cb": lambda _: key.sign_nonce("old"),
        },
    }[login]
    assert await is_refused(broker_url, **options)
    operator = find_login(broker_url, "operator", "").key
    assert operator is not None
    assert not await is_refused(broker_url, nkeys_seed_str=operator.seed)


def test_a_command_sent_before_the_login_does_nothing(broker_url: str, run_name: str) -> None:
    host, port = broker_url.removeprefix("nats://").split(":")
    subject = f"$KV.rl_{run_name}_runs.{run_name}"
    with socket.create_connection((host, int(port)), timeout=5) as raw:
        raw.recv(65536)
        raw.sendall(f"PUB {subject} 1\r\nx\r\nPING\r\n".encode())
        said = b""
        while chunk := raw.recv(65536):
            said += chunk
    assert b"Authorization Violation" in said
    assert b"PONG" not in said


@pytest.mark.parametrize("file", ["operator.key", "authorization.conf", "users", "servers"])
def test_another_user_of_the_host_reads_no_keys(file: str, tmp_path: Path, broker_url: str) -> None:
    folder = Path(os.environ["XDG_STATE_HOME"]) / "rlearner" / "brokers"
    keys = Path((folder / broker_url.removeprefix("nats://").replace(":", "_")).read_text().strip())
    assert (keys / file).exists()
    command = ["ls" if (keys / file).is_dir() else "cat", str(keys / file)]
    done = subprocess.run(command, user=65534, capture_output=True, text=True, check=False)
    assert "Permission denied" in done.stderr
    assert done.stdout == ""


# --------------------------------------------------------------------------------------- with a key
# of one role and run


def attempts() -> list[tuple[str, str, str]]:
    """Return (role, what it tries, subject) of everything that would change a stream."""
    found = []
    for role in HUBS:
        forged = [
            ("weights", "rl.{run}.weights"),
            ("a RunSpec", "$KV.rl_{run}_runs.{run}"),
            ("a desired state", "$KV.rl_{run}_control.{run}"),
            ("a ticket", "rl.{run}.tickets.lake"),
            ("an evaluation ticket", "rl.{run}.evaltickets.lake"),
            ("the reserve", "rl.{run}.reserve.0"),
            ("another role's presence", "$KV.rl_{run}_members.{run}.learner.learner"),
            ("another run's samples", "rl.{other}.samples"),
            ("another run's RunSpec", "$KV.rl_{other}_runs.{other}"),
        ]
        if role == "rollout":
            forged += [
                ("samples", "rl.{run}.samples"),
                ("episodes", "rl.{run}.episodes.default.tickets-1"),
            ]
        found += [(role, f"publishes {what}", subject) for what, subject in forged]
    return found


@pytest.mark.parametrize(
    ("role", "what", "subject"), attempts(), ids=lambda value: str(value).replace(" ", "-")
)
async def test_a_role_publishes_only_what_it_writes(
    run: Bus, broker_url: str, role: str, what: str, subject: str
) -> None:
    other = await Bus.connect(broker_url, f"{run.run}-other", name="other", deadline_s=60)
    await other.ensure_streams()
    before = await content(run), await content(other)
    data = codec.encode(
        EXAMPLES[wire.WeightsOffer] if "weights" in subject else wire.DesiredState(state="stopped")
    )
    async with stranger(broker_url, role, run.run) as one:
        await one.publish(subject.format(run=run.run, other=other.run), data)
        assert any("permissions violation" in line for line in one.refused)
    assert (await content(run), await content(other)) == before
    await other.delete_streams()
    await other.close()


REQUESTS: dict[str, tuple[str, Any]] = {
    "deletes the samples": ("STREAM.DELETE.{samples}", None),
    "purges the samples": ("STREAM.PURGE.{samples}", {}),
    "deletes a ticket": ("STREAM.MSG.DELETE.{tickets}", {"seq": 1}),
    "changes a stream": (
        "STREAM.UPDATE.{samples}",
        {"name": "{samples}", "subjects": ["rl.x"], "max_msgs": 1},
    ),
    "copies a stream": ("STREAM.CREATE.copy", {"name": "copy", "sources": [{"name": "{samples}"}]}),
    "mirrors a stream": ("STREAM.CREATE.mirror", {"name": "mirror", "mirror": {"name": "{runs}"}}),
    "has samples pushed to weights": (
        "CONSUMER.DURABLE.CREATE.{samples}.x",
        {
            "stream_name": "{samples}",
            "config": {"durable_name": "x", "deliver_subject": "rl.{run}.weights"},
        },
    ),
    "deletes the consumer": ("CONSUMER.DELETE.{tickets}.lake", None),
    "pauses the consumer": (
        "CONSUMER.PAUSE.{tickets}.lake",
        {"pause_until": "2099-01-01T00:00:00Z"},
    ),
    "backs a stream up": ("STREAM.SNAPSHOT.{samples}", {"deliver_subject": "x"}),
    "moves the leader": ("STREAM.LEADER.STEPDOWN.{samples}", None),
    "lists the streams": ("STREAM.NAMES", {}),
    "purges an account": ("ACCOUNT.PURGE.$G", None),
}


@pytest.mark.parametrize("what", REQUESTS, ids=lambda value: value.replace(" ", "-"))
@pytest.mark.parametrize("role", HUBS)
async def test_a_role_asks_jetstream_only_to_read(
    run: Bus, broker_url: str, role: str, what: str
) -> None:
    names = {"samples": SAMPLES, "tickets": TICKETS, "runs": RUNS}
    places = {name: stream.stream_name(run.run) for name, stream in names.items()} | {
        "run": run.run
    }
    subject, body = REQUESTS[what]
    for name, value in places.items():
        subject, body = (
            subject.replace(f"{{{name}}}", value),
            json.loads(json.dumps(body).replace(f"{{{name}}}", value)),
        )
    before = await content(run)
    async with stranger(broker_url, role, run.run) as one:
        assert await one.ask(f"$JS.API.{subject}", body) is None
        assert one.refused
    assert await content(run) == before


@pytest.mark.parametrize(
    ("role", "stream", "consumer"),
    [("rollout", TICKETS, "lake"), ("rewardhub", TICKETS, "lake"), ("rollout", EPISODES, "default"),
     ("envhub", EPISODES, "default"), ("rollout", EVALTICKETS, "lake")],
    ids=lambda value: getattr(value, "name", value),
)  # fmt: skip
async def test_a_role_takes_only_its_own_work(
    run: Bus, broker_url: str, role: str, stream: Stream, consumer: str
) -> None:
    name = stream.stream_name(run.run)
    async with stranger(broker_url, role, run.run) as one:
        assert (
            await one.ask(
                f"$JS.API.CONSUMER.MSG.NEXT.{name}.{consumer}", {"batch": 1, "no_wait": True}
            )
            is None
        )
        await one.publish(f"$JS.ACK.{name}.{consumer}.1.1.1.1.1", b"+ACK")
        assert len(one.refused) == 2
    assert await run.last_delivered(stream, consumer) == 0


@pytest.mark.parametrize("role", HUBS)
@pytest.mark.parametrize(
    "stream", [SAMPLES, WEIGHTS, RUNS, MEMBERS], ids=lambda stream: stream.name
)
async def test_a_role_reads_no_other_run(
    run: Bus, broker_url: str, role: str, stream: Stream
) -> None:
    own = f"{run.run}-mine"
    async with stranger(broker_url, role, own) as one:
        for request in (
            f"STREAM.MSG.GET.{stream.stream_name(run.run)}",
            f"STREAM.INFO.{stream.stream_name(run.run)}",
        ):
            assert await one.ask(f"$JS.API.{request}", {"seq": 1}) is None
        assert len(one.refused) == 2


LISTENING = [f"rl.{{run}}.{name}" for name in ("samples", "tickets.lake", "weights", "generate.s1")]


@pytest.mark.parametrize("subject", [">", "_INBOX.>", "$JS.>", "$KV.>", "rl.*.samples", *LISTENING])
async def test_a_reward_hub_overhears_nothing(run: Bus, broker_url: str, subject: str) -> None:
    async def traffic() -> None:
        await run.publish(SAMPLES, EXAMPLES[wire.Closed])
        await run.publish(TICKETS, EXAMPLES[wire.Ticket], key="lake")
        await run.publish(WEIGHTS, EXAMPLES[wire.WeightsOffer])
        await run.link.send(f"rl.{run.run}.generate.s1", b"prompt")

    async with stranger(broker_url, "rewardhub", run.run) as one:
        assert await one.hears(subject.format(run=run.run), traffic) == []
        assert any("permissions violation" in line for line in one.refused)


async def test_a_hub_reads_no_replies_to_another_role(run: Bus, broker_url: str) -> None:
    async with (
        stranger(broker_url, "envhub", run.run) as one,
        stranger(broker_url, "rewardhub", run.run) as victim,
    ):

        async def traffic() -> None:
            assert (
                await victim.ask(f"$JS.API.STREAM.INFO.{EPISODES.stream_name(run.run)}") is not None
            )

        assert await one.hears(f"{victim.inbox}.>", traffic) == []
        assert one.refused


# -------------------------------------------------------------------------------------------------------------
# revoked


async def test_a_revoked_key_is_cut_off_at_once_and_others_go_on(run: Bus, broker_url: str) -> None:
    folder = Path(os.environ["XDG_STATE_HOME"]) / "rlearner" / "brokers"
    keys = Path((folder / broker_url.removeprefix("nats://").replace(":", "_")).read_text().strip())
    guest, places = Key.generate(), KeyFolder(keys)
    user = BrokerUser(guest.public, "envhub", run.run, name="guest")
    prefix = inbox_prefix(user.role, user.run, user.name)
    places.admit(user)
    await asyncio.sleep(0.3)
    client, cut = Client(), asyncio.Event()

    async def note() -> None:
        cut.set()

    await client.connect(
        broker_url,
        nkeys_seed_str=guest.seed,
        inbox_prefix=prefix,
        allow_reconnect=False,
        closed_cb=note,
    )
    async with stranger(broker_url, "rewardhub", run.run) as other:
        one = Stranger(client, prefix)
        assert await one.ask(f"$JS.API.STREAM.INFO.{TICKETS.stream_name(run.run)}") is not None
        places.revoke(user)
        async with asyncio.timeout(2):
            await cut.wait()
        assert await other.ask(f"$JS.API.STREAM.INFO.{EPISODES.stream_name(run.run)}") is not None
    assert await is_refused(broker_url, nkeys_seed_str=guest.seed)


# --------------------------------------------------------- what is followed is signed, however it
# got to the broker

FORGED: dict[Stream, wire.Message] = {
    RUNS: msgspec.structs.replace(EXAMPLES[wire.RunSpec], epoch=99, model_path="/tmp/evil"),
    CONTROL: wire.DesiredState(state="stopped", reason="forged"),
    WEIGHTS: msgspec.structs.replace(EXAMPLES[wire.WeightsOffer], epoch=99),
}


@pytest.mark.parametrize("stream", FORGED, ids=lambda stream: stream.name)
async def test_no_unsigned_value_is_followed(
    run: Bus, broker_url: str, stream: Stream, caplog: pytest.LogCaptureFixture
) -> None:
    server = await Bus.connect(broker_url, run.run, name="server", role="rollout", deadline_s=60)
    target = (
        f"{stream.key_prefix(run.run)}{run.run}"
        if stream is not WEIGHTS
        else stream.subject(run.run)
    )
    data = codec.encode(FORGED[stream])
    await put_unsigned(run, target, data)
    stored = await find_message(run.link, stream.stream_name(run.run), last_of=target)
    assert stored is not None
    assert stored.data == data  # the broker has it, so all depends on the readers
    for reader in (run, server):
        assert await followed(reader, stream) is None
    if stream is not WEIGHTS:
        assert "the owner of the run did not sign it" in caplog.text
    await server.close()


async def put_unsigned(run: Bus, subject: str, data: bytes, **headers: str) -> None:
    """Store bytes as a process could that has got past the permissions."""
    await run.link.call(subject, data, headers=headers or None)


async def followed(reader: Bus, stream: Stream) -> wire.Message | None:
    """Return the value that a process would follow."""
    if stream is not WEIGHTS:
        found = await reader.key_value(stream).get(reader.run)
        return found[0] if found else None
    with suppress(TimeoutError):
        async with asyncio.timeout(0.5), aclosing(reader.watch_last(stream)) as offers:
            async for offer in offers:
                return offer
    return None


async def test_an_old_desired_state_cannot_be_sent_again(run: Bus, broker_url: str) -> None:
    control = run.key_value(CONTROL)
    place = f"{CONTROL.key_prefix(run.run)}{run.run}"
    old = await find_message(run.link, CONTROL.stream_name(run.run), last_of=place)
    assert old is not None
    assert old.headers is not None
    await control.put(run.run, wire.DesiredState(state="paused"))
    headers = {signatures.HEADER: old.headers[signatures.HEADER]}
    await put_unsigned(run, place, old.data, **headers)
    stored = await find_message(run.link, CONTROL.stream_name(run.run), last_of=place)
    assert stored is not None
    assert stored.data == old.data
    assert (stored.headers or {})[signatures.HEADER] == headers[signatures.HEADER]
    assert await control.get(run.run) is None
    await control.put(run.run, wire.DesiredState(state="stopped"))
    found = await control.get(run.run)
    assert found is not None
    assert found[0] == wire.DesiredState(state="stopped")


async def test_the_learner_writes_a_replaced_runspec_again(run: Bus, broker_url: str) -> None:
    learner = await Bus.connect(broker_url, run.run, name="learner", role="learner", deadline_s=60)
    watch = EpochWatch(learner, Stop(), lambda _: None)
    await watch.open()
    await watch.take_epoch(msgspec.structs.replace(EXAMPLES[wire.RunSpec], run=run.run, config={}))
    follow_epoch, follow_control = watch.services()
    follow_control.close()
    following = asyncio.create_task(follow_epoch)
    try:
        target = f"{RUNS.key_prefix(run.run)}{run.run}"
        await put_unsigned(run, target, codec.encode(FORGED[RUNS]))
        async with asyncio.timeout(10):
            while True:
                stored = await find_message(run.link, RUNS.stream_name(run.run), last_of=target)
                if (
                    stored is not None
                    and codec.decode(stored.data, wire.RunSpec).epoch == watch.epoch
                ):
                    break
                await asyncio.sleep(0.05)
        found = await run.key_value(RUNS).get(run.run)
        assert found is not None
        assert isinstance(found[0], wire.RunSpec)
        assert found[0].model_path == EXAMPLES[wire.RunSpec].model_path
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await learner.close()
