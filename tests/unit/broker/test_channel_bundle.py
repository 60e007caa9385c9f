"""Messages of the request channel travel in bundles: none is lost, their order is kept, a burst
takes few.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgpack
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from waits import until

from broker.channel.bundle import (
    FULL_AT,
    FULL_BYTES,
    MAX_BUNDLE_BYTES,
    MAX_TOKEN_CHARS,
    Entry,
    cut_bundles,
    pack,
    unpack_bundle,
)
from broker.channel.zmq_socket import SEND_AT, Frames, LoopSocket
from broker.contract.sizes import MAX_PAYLOAD_BYTES
from broker.errors import WireError

ENTRIES = st.lists(
    st.tuples(
        st.text(max_size=3), st.sampled_from([b"", b"x", b"y" * 1000, b"z" * 40_000, b"w" * 70_000])
    ),
    max_size=600,
)


@settings(deadline=None)
@given(ENTRIES)
def test_cutting_keeps_every_entry_in_order_and_within_bounds(entries: list[Entry]) -> None:
    bundles = list(cut_bundles(entries))
    assert [entry for bundle in bundles for entry in bundle] == entries
    for bundle in bundles:
        assert 1 <= len(bundle) <= FULL_AT
        assert len(bundle) == 1 or sum(len(data) for _, data in bundle) <= FULL_BYTES
    for bundle, following in itertools.pairwise(bundles):  # none ends before it is full
        assert (
            len(bundle) == FULL_AT
            or sum(len(data) for _, data in [*bundle, following[0]]) > FULL_BYTES
        )


@settings(deadline=None)
@given(st.lists(st.tuples(st.text(max_size=MAX_TOKEN_CHARS), st.binary(max_size=30)), max_size=50))
def test_a_bundle_is_a_list_of_pairs_and_comes_back_as_it_was(entries: list[Entry]) -> None:
    assert unpack_bundle(pack(entries)) == entries
    assert msgpack.unpackb(pack(entries)) == [list(entry) for entry in entries]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"no bundle",
        pack([("1", b"x")])[:-1],
        pack([("1", "text")]),
        pack([(1, b"x")]),
        pack([("1", b"x", b"y")]),
        pack([("t" * (MAX_TOKEN_CHARS + 1), b"x")]),
        pack([("1", b"")] * (FULL_AT + 1)),
        b"\xdd\xff\xff\xff\xff",
    ],
)
def test_what_is_no_bundle_is_refused(data: bytes) -> None:
    with pytest.raises(WireError, match="not a bundle of messages"):
        unpack_bundle(data)


def test_the_largest_message_fits() -> None:
    assert len(pack([("é" * MAX_TOKEN_CHARS, bytes(MAX_PAYLOAD_BYTES))])) <= MAX_BUNDLE_BYTES


@asynccontextmanager
async def pair(
    received: Callable[[Frames], None], *, listening: bool = True
) -> AsyncIterator[tuple[LoopSocket, Callable[[], object]]]:
    """An asker's socket, connected to a server's; the second value starts the server where it is
    not listening yet.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server, asker = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    if not listening:
        server.unbind(f"tcp://127.0.0.1:{port}")
    asker.setsockopt(zmq.IMMEDIATE, 1)
    asker.setsockopt(zmq.RECONNECT_IVL, 10)
    asker.setsockopt(zmq.SNDHWM, 0)
    asker.setsockopt(zmq.LINGER, 1000)
    asker.connect(f"tcp://127.0.0.1:{port}")
    there, here = LoopSocket(server, received), LoopSocket(asker, lambda _: None)
    try:
        yield here, lambda: server.bind(f"tcp://127.0.0.1:{port}")
    finally:
        here.close()
        there.close()
        await asyncio.to_thread(context.term)


async def test_a_burst_travels_in_few_messages_and_in_order() -> None:
    got: list[list[Entry]] = []
    async with pair(lambda frames: got.append(unpack_bundle(frames[1]))) as (asker, _):
        asker.post(b"", "first", b"")
        await until(lambda: got)
        for number in range(100):
            asker.post(b"", str(number), b"m%d" % number)
        await until(lambda: sum(map(len, got)) == 101)
    assert [entry for bundle in got[1:] for entry in bundle] == [
        (str(number), b"m%d" % number) for number in range(100)
    ]
    assert [len(bundle) for bundle in got] == [1, SEND_AT, SEND_AT, SEND_AT, 100 - 3 * SEND_AT]


async def test_what_was_posted_before_somebody_listens_arrives_unless_nobody_waits_for_it_any_more() -> (
    None
):
    got: list[Entry] = []
    async with pair(lambda frames: got.extend(unpack_bundle(frames[1])), listening=False) as (
        asker,
        listen,
    ):
        loop = asyncio.get_running_loop()
        gone, waits = loop.create_future(), loop.create_future()
        for number in range(90):
            asker.post(b"", str(number), b"x" * 3000, gone if number % 3 == 1 else waits)
        await asyncio.sleep(0.05)
        gone.cancel()
        asker.post(b"", "90", b"")
        listen()
        await until(lambda: len(got) == 61)
    assert [token for token, _ in got] == [str(number) for number in range(91) if number % 3 != 1]


async def test_closing_sends_what_was_posted() -> None:
    got: list[Entry] = []
    async with pair(lambda frames: got.extend(unpack_bundle(frames[1]))) as (asker, _):
        asker.post(b"", "0", b"")
        await until(lambda: got)
        for number in range(1, 50):
            asker.post(b"", str(number), b"")
        asker.close()
        await until(lambda: len(got) == 50)
    assert [token for token, _ in got] == [str(number) for number in range(50)]


async def test_answers_to_several_askers_each_travel_in_a_bundle_of_their_own() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = context.socket(zmq.ROUTER)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    routes: list[bytes] = []
    there = LoopSocket(server, lambda frames: routes.append(frames[0]))
    got: dict[int, list[list[Entry]]] = {0: [], 1: []}
    askers = []
    for number in got:
        socket = context.socket(zmq.DEALER)
        socket.connect(f"tcp://127.0.0.1:{port}")
        askers.append(
            LoopSocket(
                socket, lambda frames, number=number: got[number].append(unpack_bundle(frames[0]))
            )
        )  # type: ignore[misc]
        askers[-1].post(b"", "hello", b"")
        await until(lambda: len(routes) == len(askers))
    for index in range(20):
        there.post(routes[index % 2], str(index), b"")
    await until(lambda: got[0] and got[1])
    for one in (*askers, there):
        one.close()
    await asyncio.to_thread(context.term)
    assert got == {
        number: [[(str(index), b"") for index in range(number, 20, 2)]] for number in (0, 1)
    }
