"""The rendezvous' keys and waits, and torch's store interface over encrypted sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta

import pytest
import torch
import zmq
from zmq.utils.monitor import recv_monitor_message

from broker.errors import TransferFailed
from broker.weights.rendezvous.board import Board, BoardFull
from broker.weights.rendezvous.board_client import BoardClient, KeyPair, RendezvousAddress
from broker.weights.rendezvous.board_server import BoardServer


def test_values_are_set_added_compared_and_deleted() -> None:
    board = Board()
    board.set("a", b"1")
    board.append("a", b"2")
    assert (board.get("a"), board.get("b"), board.has(["a"]), board.has(["a", "b"])) == (
        b"12",
        None,
        True,
        False,
    )
    assert (board.add("n", 3), board.add("n", -1)) == (3, 2)
    assert board.compare_set("c", b"x", b"y") == b"x"  # missing, and not expected to be
    assert board.compare_set("c", b"", b"y") == b"y"
    assert board.compare_set("c", b"x", b"z") == b"y"
    assert board.compare_set("c", b"y", b"z") == b"z"
    assert (board.delete("c"), board.delete("c"), len(board)) == (True, False, 2)
    assert board.size_bytes == len("a12n2")


def test_waits_end_when_all_keys_are_there_or_at_their_deadline() -> None:
    board = Board()
    board.wait("both", ["a", "b"], deadline=10.0)
    board.wait("late", ["never"], deadline=3.0)
    board.set("a", b"1")
    assert board.ended(2.0) == []
    assert board.next_deadline() == 3.0
    board.set("b", b"2")
    ended = {wait.token: wait.values for wait in board.ended(3.0)}
    assert ended == {"both": [b"1", b"2"], "late": None}
    assert (board.ended(99.0), board.next_deadline()) == ([], None)


def test_a_board_is_bounded_and_sealed_keys_stay() -> None:
    board = Board(max_keys=2, max_bytes=20)
    board.set("a", b"12345")
    with pytest.raises(BoardFull, match="full: 1 keys, 6 bytes"):
        board.set("b", b"x" * 14)
    board.set("b", b"x")
    with pytest.raises(BoardFull, match="full: 2 keys"):
        board.set("c", b"")
    board.set("a", b"")  # smaller than before
    board.seal("a")
    for change in (
        lambda: board.set("a", b"2"),
        lambda: board.append("a", b"2"),
        lambda: board.delete("a"),
    ):
        with pytest.raises(BoardFull, match="read-only"):
            change()
    assert board.get("a") == b""


@pytest.fixture
def server() -> Iterator[BoardServer]:
    made = BoardServer("127.0.0.1")
    yield made
    made.close()


def address(server: BoardServer, key: str = "") -> RendezvousAddress:
    return RendezvousAddress("127.0.0.1", server.port, key or server.key)


def test_an_admitted_member_and_the_learner_share_a_torch_store(server: BoardServer) -> None:
    keys, learner = KeyPair.make(), server.store(5.0)
    server.admit("r1", keys.public)
    with closing(BoardClient(address(server), keys, 5.0)) as member:
        timer = threading.Timer(0.2, lambda: learner.set("later", "yes"))
        timer.start()
        started = time.monotonic()
        assert member.get("later") == b"yes"
        assert 0.1 < time.monotonic() - started < 2.0
        assert (member.add("n", 2), learner.add("n", 3), member.num_keys()) == (2, 5, 2)
        learner.multi_set(["x", "y"], ["1", b"2"])
        assert member.multi_get(["x", "y"]) == [b"1", b"2"]
        assert (member.check(["x", "z"]), member.delete_key("x"), member.check(["x"])) == (
            False,
            True,
            False,
        )
        with pytest.raises(RuntimeError, match=r"wait timeout after 0\.3 s, keys: never"):
            member.wait(["never"], timedelta(seconds=0.3))
        server.keep("plan", b"text")
        with pytest.raises(RuntimeError, match="read-only"):
            member.set("plan", "other")
        with pytest.raises(RuntimeError, match="length <= 1048576"):
            member.set("big", b"x" * (1 << 20 | 1))
        assert learner.get("plan") == b"text"


def test_gloo_connects_through_it(server: BoardServer) -> None:
    from broker.weights.carriers import CARRIERS
    from broker.weights.group import WaitMonitor
    from broker.weights.protocol.session import TransferSettings

    keys = KeyPair.make()
    server.admit("r1", keys.public)
    with closing(BoardClient(address(server), keys, 5.0)) as member:
        received = torch.zeros(1000, dtype=torch.uint8)

        def end(rank: int, store: object, bucket: torch.Tensor) -> None:
            group = CARRIERS["gloo"].open_group(
                store, "g", rank=rank, size=2, settings=TransferSettings(timeout_s=5.0)
            )
            group.broadcast([bucket], WaitMonitor(), done=lambda index: None, peek=lambda: None)
            group.close().join()

        thread = threading.Thread(target=end, args=(1, member, received))
        thread.start()
        end(0, server.store(5.0), torch.full((1000,), 7, dtype=torch.uint8))
        thread.join()
        assert received.sum() == 7000


def test_strangers_get_nothing(server: BoardServer) -> None:
    keys = KeyPair.make()
    server.admit("r1", keys.public)
    server.keep("plan", b"secret")
    with pytest.raises(
        TransferFailed,
        match=r"no answer from the learner's rendezvous 127\.0\.0\.1:\d+ within 0\.5 s",
    ):
        # it knows the address, but its key was not admitted
        BoardClient(address(server), KeyPair.make(), 0.5)
    with pytest.raises(TransferFailed, match="no answer"):
        # the learner's key is another's
        BoardClient(address(server, KeyPair.make().public), keys, 0.5)
    with zmq.Context() as context, context.socket(zmq.DEALER) as plain:  # it does not encrypt
        plain.linger = 0
        plain.connect(f"tcp://127.0.0.1:{server.port}")
        plain.send_multipart([b"1", b"\x91\xa4peek\x91\xa4plan"])
        assert plain.poll(500) == 0
    with closing(BoardClient(address(server), keys, 2.0)) as member:
        assert member.peek("plan") == b"secret"


def test_a_stranger_is_refused_before_it_can_send_anything(server: BoardServer) -> None:
    keys = KeyPair.make()
    server.admit("r1", keys.public)
    for pair, expected in ((keys, True), (KeyPair.make(), False)):
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.curve_serverkey = server.key.encode()
            socket.curve_publickey, socket.curve_secretkey = pair.public.encode(), pair.secret
            done = (
                zmq.Event.HANDSHAKE_SUCCEEDED
                | zmq.Event.HANDSHAKE_FAILED_AUTH
                | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
            )
            monitor = socket.get_monitor_socket(done)
            socket.connect(f"tcp://127.0.0.1:{server.port}")
            assert monitor.poll(3000)
            assert (
                recv_monitor_message(monitor)["event"] == zmq.Event.HANDSHAKE_SUCCEEDED
            ) is expected
            socket.disable_monitor()
            monitor.close()


def test_a_learner_that_is_gone_is_noticed_before_the_timeout() -> None:
    keys, server = KeyPair.make(), BoardServer("127.0.0.1")
    server.admit("r1", keys.public)
    with closing(BoardClient(address(server), keys, 30.0)) as member:
        threading.Timer(0.2, server.close).start()
        started = time.monotonic()
        with pytest.raises(RuntimeError, match="closed the connection"):
            member.get("never")
        assert time.monotonic() - started < 5.0


def test_a_key_belongs_to_one_server(server: BoardServer) -> None:
    keys = KeyPair.make()
    assert server.admit("r1", keys.public)
    assert not server.admit("r2", keys.public)
    assert server.admitted() == {"r1"}
    assert server.admit("r1", keys.public)


def test_an_expelled_member_gets_nothing_more_on_its_open_connection(server: BoardServer) -> None:
    keys, newer = KeyPair.make(), KeyPair.make()
    server.admit("r1", keys.public)
    with closing(BoardClient(address(server), keys, 2.0)) as member:
        member.set("mine", "1")
        server.expel("r1")
        member.timeout_s = 0.5
        with pytest.raises(RuntimeError, match="did not answer"):
            member.set("mine", "2")
    assert server.store(1.0).peek("mine") == b"1"
    with pytest.raises(TransferFailed, match="no answer"):
        BoardClient(address(server), keys, 0.5)
    server.admit("r1", newer.public)
    with closing(BoardClient(address(server), newer, 2.0)) as member:
        assert member.peek("mine") == b"1"


def test_a_member_that_waits_while_it_is_expelled_gets_nothing(server: BoardServer) -> None:
    keys = KeyPair.make()
    server.admit("r1", keys.public)
    with closing(BoardClient(address(server), keys, 0.5)) as member:
        threading.Timer(
            0.1, lambda: (server.expel("r1"), server.store(1.0).set("secret", "1"))
        ).start()
        with pytest.raises(RuntimeError, match="did not answer"):
            member.wait_for("secret", 0.5)


def test_odd_requests_harm_nobody(server: BoardServer) -> None:
    keys = KeyPair.make()
    server.admit("r1", keys.public)
    with closing(BoardClient(address(server), keys, 2.0)) as member, member.connect() as raw:
        for body in (
            b"",
            b"\xc1",
            b"\x91\xa4sing",
            b"\x92\xa5fetch\x91\xa1x",
            b"\x92\xa3add\x90",
            b"\x91" * 10_000,
        ):
            raw.send_multipart([b"1", body])
            assert raw.poll(2000), body[:20]
            assert raw.recv_multipart()[1] == b"!"
        raw.send_multipart([b"1"])
        raw.send_multipart([b"1", b"2", b"3", b"4"])
        assert raw.poll(300) == 0
        assert member.num_keys() == 0


def test_a_taken_port_is_an_error_that_names_it(server: BoardServer) -> None:
    with pytest.raises(OSError, match="in use"):
        BoardServer("127.0.0.1", server.port)
