"""One suite that every carrier of generation requests passes, over a real nats-server."""

from __future__ import annotations

import asyncio
import math
import os
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import zmq
import zmq.asyncio
from waits import LONG_S, until

from broker.channel import carriers, local_sockets
from broker.channel.bundle import pack, unpack_bundle
from broker.channel.carriers import ChannelClient, ChannelServer
from broker.channel.zmq_address import ServerAddress, this_host
from broker.channel.zmq_client import ZmqClient
from broker.contract import codec, wire
from broker.contract.streams import DEAD, GENERATE
from broker.errors import ConfigError, RequestFailed, WireError
from broker.jetstream.bus import Bus
from broker.settings.registry import known

KEY = zmq.curve_keypair()[0].decode()
KINDS = known("channels", carriers.CHANNELS)


def request(name: str = "r1", tokens: int = 3, **more: object) -> wire.GenerateRequest:
    return wire.GenerateRequest(
        request_id=name,
        conversation_id="c1",
        token_ids=wire.column(range(tokens), "<i4"),
        sampling=wire.SamplingParams(max_tokens=4),
        **more,  # type: ignore[arg-type]
    )


def reply_to(asked: wire.GenerateRequest, **more: object) -> wire.GenerateReply:
    """The context reversed, as if sampled."""
    tokens = asked.token_ids.array()[::-1]
    fields: dict[str, object] = {
        "finish_reason": "stop",
        "server": "s1",
        "policy_version": 3,
    } | more
    return wire.GenerateReply(
        request_id=asked.request_id,
        token_ids=wire.column(tokens, "<i4"),
        logprobs=wire.column([-0.5] * len(tokens), "<f4"),
        version_runs=wire.column([3, len(tokens)], "<i4"),
        **fields,  # type: ignore[arg-type]
    )


class Engine:
    """Holds requests until they are released or aborted, and answers them at once if asked to."""

    def __init__(self, *, at_once: bool = True) -> None:
        self.at_once = at_once
        self.seen: list[str] = []
        self.aborted: list[str] = []
        self.events: dict[str, asyncio.Event] = {}
        self.most = 0

    async def handle(self, asked: wire.GenerateRequest) -> wire.GenerateReply:
        self.seen.append(asked.request_id)
        event = self.events.setdefault(asked.request_id, asyncio.Event())
        self.most = max(self.most, sum(not held.is_set() for held in self.events.values()))
        if self.at_once:
            event.set()
        await event.wait()
        return reply_to(
            asked, finish_reason="abort" if asked.request_id in self.aborted else "stop"
        )

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        if request_id in self.events:
            self.events[request_id].set()


Serve = Callable[..., Awaitable[ChannelServer]]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def serve(kind: str, bus: Bus) -> AsyncIterator[Serve]:
    servers: list[ChannelServer] = []

    async def start(engine: Engine, server_id: str = "s1") -> ChannelServer:
        server = carriers.make_server(kind, bus, server_id)
        await server.start(engine.handle, engine.abort)
        servers.append(server)
        return server

    yield start
    for server in servers:
        await server.close()


@pytest.fixture
async def client(kind: str, bus: Bus) -> AsyncIterator[ChannelClient]:
    made = carriers.make_client(kind, bus)
    yield made
    await made.close()


def closed(port: int) -> str:
    """The address of a server at a port of this host that has no listener."""
    return str(ServerAddress(f"tcp://127.0.0.1:{port}", KEY, this_host()))


async def letters(bus: Bus, count: int) -> list[wire.DeadLetter]:
    found: list[wire.DeadLetter] = []
    async with asyncio.timeout(LONG_S):
        async for record in bus.read_log(DEAD, 1):
            assert isinstance(record.message, wire.DeadLetter)
            found.append(record.message)
            if len(found) == count:
                return found
    raise AssertionError("unreachable")


async def test_a_reply_comes_back_whole(serve: Serve, client: ChannelClient) -> None:
    server = await serve(Engine())
    reply = await client.generate(server.address, request(tokens=5), timeout_s=60)
    assert reply.request_id == "r1"
    assert reply.token_ids.array().tolist() == [4, 3, 2, 1, 0]
    assert reply.logprobs.array().tolist() == [-0.5] * 5
    assert reply.version_runs.array().tolist() == [3, 5]
    assert (reply.finish_reason, reply.policy_version) == ("stop", 3)


async def test_many_requests_run_at_once_and_answers_find_their_askers(
    serve: Serve, client: ChannelClient
) -> None:
    engine = Engine(at_once=False)
    server = await serve(engine)
    tasks = [
        asyncio.create_task(
            client.generate(server.address, request(f"r{n}", tokens=n + 1), timeout_s=60)
        )
        for n in range(100)
    ]
    await until(lambda: len(engine.seen) == 100)
    assert engine.most == 100
    for n in reversed(range(100)):  # answered in another order than asked
        engine.events[f"r{n}"].set()
    replies = await asyncio.gather(*tasks)
    assert [(reply.request_id, len(reply.token_ids.array())) for reply in replies] == [
        (f"r{n}", n + 1) for n in range(100)
    ]


async def test_two_askers_and_two_servers_do_not_mix(
    serve: Serve, client: ChannelClient, kind: str, bus: Bus
) -> None:
    one, two = Engine(), Engine()
    first, second = await serve(one, "s1"), await serve(two, "s2")
    other = carriers.make_client(kind, bus)
    try:
        replies = await asyncio.gather(
            client.generate(first.address, request("same", 1), timeout_s=60),
            other.generate(first.address, request("same", 2), timeout_s=60),
            client.generate(second.address, request("same", 3), timeout_s=60),
        )
    finally:
        await other.close()
    assert [len(reply.token_ids.array()) for reply in replies] == [1, 2, 3]
    assert (len(one.seen), len(two.seen)) == (2, 1)


async def test_abort_brings_the_partial_output(serve: Serve, client: ChannelClient) -> None:
    engine = Engine(at_once=False)
    server = await serve(engine)
    task = asyncio.create_task(client.generate(server.address, request(), timeout_s=60))
    await until(lambda: engine.seen)
    await client.abort(server.address, "r1")
    assert (await task).finish_reason == "abort"
    assert engine.aborted == ["r1"]


async def test_no_answer_in_time_fails_and_aborts(serve: Serve, client: ChannelClient) -> None:
    engine = Engine(at_once=False)
    server = await serve(engine)
    with pytest.raises(RequestFailed, match=r"no answer within 0\.3 s"):
        await client.generate(server.address, request(), timeout_s=0.3)
    await until(lambda: engine.aborted == ["r1"])
    # the line still works
    assert (
        len((await client.generate(server.address, request("r1"), timeout_s=60)).token_ids.array())
        == 3
    )


async def test_a_cancelled_asker_aborts(serve: Serve, client: ChannelClient) -> None:
    engine = Engine(at_once=False)
    server = await serve(engine)
    task = asyncio.create_task(client.generate(server.address, request(), timeout_s=60))
    await until(lambda: engine.seen)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: engine.aborted == ["r1"])


async def test_forget_fails_outstanding_at_once_and_only_there(
    serve: Serve, client: ChannelClient
) -> None:
    gone, stays = Engine(at_once=False), Engine(at_once=False)
    first, second = await serve(gone, "s1"), await serve(stays, "s2")
    lost = [
        asyncio.create_task(client.generate(first.address, request(f"g{n}"), timeout_s=60))
        for n in range(3)
    ]
    kept = asyncio.create_task(client.generate(second.address, request("k"), timeout_s=60))
    await until(lambda: len(gone.seen) == 3 and stays.seen)
    started = time.monotonic()
    await client.forget(first.address)
    for outcome in await asyncio.gather(*lost, return_exceptions=True):
        assert isinstance(outcome, RequestFailed)
        assert "gone" in str(outcome)
    assert time.monotonic() - started < 30  # half the request's own time
    stays.events["k"].set()
    assert (await kept).finish_reason == "stop"


async def test_nobody_there_fails_soon(client: ChannelClient, kind: str) -> None:
    address = closed(9) if kind == "zmq" else "nobody"
    started = time.monotonic()
    with pytest.raises(RequestFailed, match="nothing listens there"):
        await client.generate(address, request(), timeout_s=60)
    assert time.monotonic() - started < 30


async def test_an_address_that_is_none_fails(client: ChannelClient) -> None:
    with pytest.raises(RequestFailed):
        await client.generate("not an address", request(), timeout_s=5)


async def test_a_request_that_breaks_the_rules_is_not_sent(
    serve: Serve, client: ChannelClient
) -> None:
    engine = Engine()
    server = await serve(engine)
    with pytest.raises(WireError, match="at least one token"):
        await client.generate(server.address, request(tokens=0), timeout_s=5)
    assert engine.seen == []


async def test_a_handler_that_raises_answers_an_error_and_the_next_request_works(
    serve: Serve, client: ChannelClient
) -> None:
    engine = Engine()
    server = await serve(engine)
    await server.close()

    async def broken(asked: wire.GenerateRequest) -> wire.GenerateReply:
        if asked.request_id == "bad":
            raise ValueError("no such\nlayer")
        return reply_to(asked)

    engine.handle = broken  # type: ignore[method-assign]
    server = await serve(engine, "s3")
    reply = await client.generate(server.address, request("bad"), timeout_s=60)
    assert (reply.finish_reason, reply.error, reply.server) == (
        "error",
        "ValueError: no such layer",
        "s3",
    )
    assert (
        await client.generate(server.address, request("good"), timeout_s=60)
    ).finish_reason == "stop"


async def test_an_answer_that_breaks_the_rules_becomes_an_error(
    serve: Serve, client: ChannelClient
) -> None:
    engine = Engine()

    async def wrong(asked: wire.GenerateRequest) -> wire.GenerateReply:
        return reply_to(asked, policy_version=-7)

    engine.handle = wrong  # type: ignore[method-assign]
    server = await serve(engine)
    reply = await client.generate(server.address, request(), timeout_s=60)
    assert reply.finish_reason == "error"
    assert "policy_version: -7" in reply.error


async def send_raw(kind: str, bus: Bus, address: str, data: bytes) -> bytes:
    """Send bytes that are no message, as another program might."""
    if kind == "nats":
        return bytes((await bus.link.call(GENERATE.subject(bus.run, address), data)).data)
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    try:
        socket.connect(ServerAddress.parse(address).endpoint()[0])  # a local socket
        await socket.send(pack([("7", data)]))
        ((token, answer),) = unpack_bundle(await socket.recv())
        assert token == "7"
        return bytes(answer)
    finally:
        socket.close(0)
        context.term()


async def test_a_malformed_request_is_buried_and_answered_with_an_error(
    serve: Serve, client: ChannelClient, kind: str, bus: Bus
) -> None:
    engine = Engine()
    server = await serve(engine)
    async with asyncio.timeout(LONG_S):
        answer = codec.decode(
            await send_raw(kind, bus, server.address, b"\x93garbage"), wire.GenerateReply
        )
    assert answer.finish_reason == "error"
    assert answer.server == "s1"
    (letter,) = await letters(bus, 1)
    assert (letter.stream, letter.data) == ("generate", b"\x93garbage")
    assert letter.reason == answer.error
    assert (await client.generate(server.address, request(), timeout_s=60)).finish_reason == "stop"


async def answer_raw(
    kind: str, bus: Bus, answer: bytes
) -> tuple[str, Callable[[], Awaitable[None]]]:
    """A server that answers everything with the given bytes: its address, and how to stop it."""
    if kind == "nats":

        async def on_request(message: object) -> None:
            await bus.link.send(message.reply, answer)  # type: ignore[attr-defined]

        subscribed = await bus.link.subscribe(GENERATE.subject(bus.run, "raw"), on_request)
        return "raw", subscribed.close
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.ROUTER)
    name = local_sockets.new_name()
    socket.bind(f"ipc://{local_sockets.path_of(name)}")

    async def loop() -> None:
        while True:
            identity, asked = await socket.recv_multipart()
            await socket.send_multipart(
                [identity, pack([(token, answer) for token, _ in unpack_bundle(asked)])]
            )

    task = asyncio.create_task(loop())

    async def stop() -> None:
        task.cancel()
        await asyncio.wait([task])
        socket.close(0)
        context.term()

    return f"local={name}", stop


async def test_a_malformed_reply_fails_the_request_and_is_buried(
    client: ChannelClient, kind: str, bus: Bus
) -> None:
    address, stop = await answer_raw(kind, bus, b"\xc1")
    try:
        with pytest.raises(RequestFailed, match="GenerateReply"):
            await client.generate(address, request(), timeout_s=60)
    finally:
        await stop()
    (letter,) = await letters(bus, 1)
    assert (letter.stream, letter.data) == ("generate", b"\xc1")


async def test_server_with_nan_logprobs_is_named(
    client: ChannelClient, kind: str, bus: Bus
) -> None:
    reply = reply_to(request("r1"))
    number = reply.logprobs.data[:4]
    data = codec.encode(reply).replace(number, struct.pack("<f", math.nan))
    assert data != codec.encode(reply)
    address, stop = await answer_raw(kind, bus, data)
    try:
        with pytest.raises(RequestFailed, match=r"GenerateReply.logprobs: nan; must be finite"):
            await client.generate(address, request(), timeout_s=60)
    finally:
        await stop()


async def test_an_answer_to_another_request_fails(
    client: ChannelClient, kind: str, bus: Bus
) -> None:
    address, stop = await answer_raw(kind, bus, codec.encode(reply_to(request("other"))))
    try:
        with pytest.raises(RequestFailed, match="'other' instead of 'r1'"):
            await client.generate(address, request(), timeout_s=60)
    finally:
        await stop()


async def test_a_closing_server_returns_partial_outputs(
    serve: Serve, client: ChannelClient
) -> None:
    engine = Engine(at_once=False)
    server = await serve(engine)
    tasks = [
        asyncio.create_task(client.generate(server.address, request(f"r{n}", 1000), timeout_s=60))
        for n in range(200)
    ]
    await until(lambda: len(engine.seen) == 200)
    await server.close()  # the connection ends right behind the answers
    assert [reply.finish_reason for reply in await asyncio.gather(*tasks)] == ["abort"] * 200
    assert set(engine.aborted) == {f"r{n}" for n in range(200)}


async def test_a_closing_server_answers_for_a_handler_that_hangs(
    serve: Serve, client: ChannelClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.channel.endpoint.CLOSE_WITHIN_S", 0.2)
    engine = Engine(at_once=False)
    engine.abort = lambda request_id: None  # type: ignore[method-assign]
    server = await serve(engine)
    task = asyncio.create_task(client.generate(server.address, request(), timeout_s=60))
    await until(lambda: engine.seen)
    await server.close()
    reply = await task
    assert (reply.finish_reason, reply.error) == ("error", "the server is closing")


async def test_closing_the_client_fails_what_is_outstanding(
    serve: Serve, client: ChannelClient
) -> None:
    engine = Engine(at_once=False)
    server = await serve(engine)
    task = asyncio.create_task(client.generate(server.address, request(), timeout_s=60))
    await until(lambda: engine.seen)
    await client.close()
    with pytest.raises(RequestFailed, match="closed"):
        await task
    with pytest.raises(RequestFailed, match="closed"):
        await client.generate(server.address, request("late"), timeout_s=5)


async def test_a_large_request_and_reply_pass(serve: Serve, client: ChannelClient) -> None:
    server = await serve(Engine())
    reply = await client.generate(server.address, request(tokens=900_000), timeout_s=60)
    assert reply.token_ids.array()[0] == 899_999


@pytest.mark.parametrize(
    "bind", ["0.0.0.0", "[::]:7000", "224.0.0.1", "host", "127.0.0.1:99999", "127.0.0.1:7000:1"]
)
def test_a_server_is_bound_to_one_address_only(bind: str) -> None:
    refused = rf"--bind: '{re.escape(bind)}' is not allowed; expected an IP address of one interface .*127\.0\.0\.1"
    with pytest.raises(ConfigError, match=refused):
        carriers.make_server("zmq", None, "s1", bind=bind)  # type: ignore[arg-type]


def test_an_unknown_kind_lists_the_known() -> None:
    with pytest.raises(ConfigError, match="nats, zmq"):
        carriers.make_client("carrier-pigeon", None)  # type: ignore[arg-type]


SERVER_PROGRAM = """
import asyncio, sys
from broker.channel import carriers
async def hang(request):
    print("got", flush=True)
    await asyncio.sleep(600)
async def main():
    server = carriers.make_server("zmq", None, "s1", bind="")
    await server.start(hang, lambda request_id: None)
    print(server.address, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_a_killed_zmq_server_fails_its_requests_at_once(bus: Bus) -> None:
    program = [sys.executable, "-c", SERVER_PROGRAM]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:  # noqa: ASYNC220
        assert process.stdout is not None
        client = carriers.make_client("zmq", bus)
        try:
            address = (await asyncio.to_thread(process.stdout.readline)).strip()
            task = asyncio.create_task(client.generate(address, request(), timeout_s=60))
            assert (await asyncio.to_thread(process.stdout.readline)).strip() == "got"
            started = time.monotonic()
            os.kill(process.pid, signal.SIGKILL)
            with pytest.raises(RequestFailed, match=r"connection broke|nothing listens"):
                await task
            assert time.monotonic() - started < 30
        finally:
            process.kill()
            await client.close()


# ----------------------------------------------------------------------------------------- many
# servers, few sockets


async def ask_closed_ports(
    client: ChannelClient, ports: range
) -> list[BaseException | wire.GenerateReply]:
    """What becomes of one request to each of many addresses at which nobody listens."""
    asking = (
        client.generate(closed(port), request(f"r{port}"), timeout_s=LONG_S) for port in ports
    )
    return await asyncio.gather(*asking, return_exceptions=True)


async def test_a_client_asks_more_servers_than_a_context_has_sockets_by_default(bus: Bus) -> None:
    """ZeroMQ's default of 1,023 sockets is enough for 341 servers."""
    client = carriers.make_client("zmq", bus)
    outcomes = await ask_closed_ports(client, range(1, 501))
    await client.close()
    assert {type(outcome) for outcome in outcomes} == {RequestFailed}
    assert {str(outcome).partition(": ")[2] for outcome in outcomes} == {"nothing listens there"}


async def test_a_client_without_sockets_left_fails_the_request_and_goes_on(bus: Bus) -> None:
    """The asker then tries another server; it is no error of an environment."""
    client = ZmqClient(bus)
    client._context.set(zmq.MAX_SOCKETS, 30)
    outcomes = await ask_closed_ports(client, range(1, 21))
    assert {type(outcome) for outcome in outcomes} == {RequestFailed}
    assert "no connection can be opened: Too many open files" in {
        str(outcome).partition(": ")[2] for outcome in outcomes
    }
    for port in range(1, 21):
        await client.forget(closed(port))
    async with asyncio.timeout(LONG_S):  # sockets are freed by a thread of ZeroMQ's
        while "nothing listens there" not in str(  # noqa: ASYNC110
            (await ask_closed_ports(client, range(30, 31)))[0]
        ):
            await asyncio.sleep(0.05)
    await client.close()
