"""Ranks that join rank 0 over its rendezvous, in threads of one process, and all that can be wrong
with them.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import torch

from broker.errors import NodesMissing, UserError
from broker.weights.rendezvous.board_server import BoardServer
from learner.backends.ranks import follower
from learner.backends.ranks.link import LinkClosedError, RankLink
from learner.backends.ranks.messages import BuildCommand, DiscardCommand, SumsReply
from learner.backends.ranks.rendezvous import Meeting, join_group
from learner.nodes import gathering as gathering_module
from learner.nodes import node_ranks as node_ranks_module
from learner.nodes import rank as rank_module
from learner.nodes.encrypted_link import (
    OTHER_RANKS,
    RANK_0,
    EncryptedFrames,
    LinkWatch,
    prepare_socket,
)
from learner.nodes.gathering import Gathering
from learner.nodes.key import NodeKey, read_key
from learner.nodes.local_ranks import RankStart
from learner.nodes.node_ranks import NodeRanks
from learner.nodes.placement import Placement
from learner.nodes.rank import JoiningRank

CONFIG = {"train": {"ranks": 2, "lr": 1e-3}}
LONG_S = 60.0


class Joining:
    """A rank in a thread."""

    def __init__(self, start: RankStart) -> None:
        self.code: int | None = None
        self._thread = threading.Thread(target=self._run, args=(start,), daemon=True)
        self._thread.start()

    def _run(self, start: RankStart) -> None:
        self.code = JoiningRank(start).run()

    def ends(self) -> int | None:
        self._thread.join(LONG_S)
        return self.code


class Place:
    """Where the ranks of a test meet."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.key_file = folder / "nodes.key"

    def gathering(self, size: int = 2, num_nodes: int = 2) -> Gathering:
        placement = Placement(0, num_nodes, "127.0.0.1", self.port, "--nnodes")
        return Gathering(placement, 1, size, self.key_file, CONFIG)

    def join(
        self,
        node: int = 1,
        config: dict[str, Any] = CONFIG,
        key_file: Path | None = None,
        wait_s: float = 30.0,
    ) -> Joining:
        known = (str(key_file or self.key_file), config, wait_s)
        return Joining(RankStart(node, 2, "127.0.0.1", self.port, 0, 1, *known))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(gathering_module, "POLL_S", 0.01)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Place(tmp_path)


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Computing:
    """A backend of which each rank joins a group of gloo and adds up numbers."""

    error: Exception | None = None
    built: ClassVar[list[BuildCommand]] = []
    parted = 0

    @classmethod
    def follow(cls, build: BuildCommand, meeting: Meeting) -> Computing:
        cls.built.append(build)
        assert meeting.address == "127.0.0.1"
        meeting.store.set("hello", f"from rank {build.rank}")
        return cls()

    def obey(self, *_: object) -> SumsReply:
        if self.error is not None:
            raise self.error
        return SumsReply([{"n": 2.0}])

    def part(self) -> None:
        type(self).parted += 1


@pytest.fixture
def computing(monkeypatch: pytest.MonkeyPatch) -> type[Computing]:
    monkeypatch.setattr(follower, "resolve", lambda *_: Computing)
    monkeypatch.setattr(Computing, "built", [])
    monkeypatch.setattr(Computing, "parted", 0)
    monkeypatch.setattr(Computing, "error", None)
    return Computing


def test_ranks_join_obey_and_end_with_the_code_of_rank_0(
    place: Place, computing: type[Computing]
) -> None:
    gathering, joining = place.gathering(), place.join()
    ranks = gathering.gather(LONG_S)
    for time_built in (1, 2):  # a learner that loads again builds again
        ranks.build("any:Any", {"model_path": "a/name", "seed": 7})
        ranks.links[0].send(DiscardCommand())
        assert ranks.links[0].receive_reply() == SumsReply([{"n": 2.0}])
        assert ranks.meeting().store.get("hello") == b"from rank 1"
        ranks.close()
        assert computing.parted == time_built
    assert [
        (one.rank, one.size, one.local_rank, one.num_here, one.store) for one in computing.built
    ] == [
        (1, 2, 0, 1, "group-1"),
        (1, 2, 0, 1, "group-2"),
    ]
    ranks.end(130)
    assert joining.ends() == 130


def test_a_difference_ends_all_with_the_line(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    gathering, joining = place.gathering(), place.join(config={"train": {"ranks": 2, "lr": 2e-3}})
    with (
        caplog.at_level(logging.ERROR),
        pytest.raises(UserError, match=r"train\.lr is 0\.002 on node 1") as error,
    ):
        gathering.gather(LONG_S)
    assert joining.ends() == 2
    assert str(error.value) in caplog.messages


def test_too_few_ranks_end_all(place: Place) -> None:
    gathering, joining = place.gathering(size=3), place.join()
    with pytest.raises(
        UserError, match=r"train\.ranks: 3 is not allowed; .* 1 on node 0, 1 on node 1"
    ):
        gathering.gather(LONG_S)
    assert joining.ends() == 2


def test_a_number_that_is_taken_is_refused_to_the_second(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    gathering = place.gathering(size=3, num_nodes=3)
    first = place.join()
    found: list[NodeRanks] = []
    gathers = threading.Thread(target=lambda: found.append(gathering.gather(LONG_S)))
    gathers.start()
    until(lambda: gathering._roll.present.get((1, 0)))
    with caplog.at_level(logging.ERROR):
        assert place.join().ends() == 2
    assert any(line.startswith("--node-rank 1 is taken by ") for line in caplog.messages)
    last = place.join(node=2)
    gathers.join()
    found[0].end(0)
    assert (first.ends(), last.ends()) == (0, 0)


def test_missing_nodes_are_listed(
    place: Place, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering_module, "FIRST_LIST_S", 0.1)
    gathering = place.gathering(num_nodes=3)
    joining = place.join()
    here = r"here: node 0 \(.+\), node 1 \(.+\); missing: node 2"
    with (
        caplog.at_level(logging.INFO),
        pytest.raises(NodesMissing, match=f"not all nodes came within 5 s; {here}"),
    ):
        gathering.gather(5.0)
    assert joining.ends() == 1
    assert any(
        line.startswith("waiting for the other nodes; here: node 0") for line in caplog.messages
    )


def test_another_key_is_refused_at_both_ends(
    place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_module, "ANSWER_S", 1.0)
    gathering, other = place.gathering(), tmp_path / "other.key"
    read_key(other, make=True)
    with caplog.at_level(logging.WARNING):
        assert place.join(key_file=other).ends() == 2
    assert (
        f"127.0.0.1:{place.port} does not know the key {other} of node 1: copy that of node 0 here"
        in caplog.text
    )
    with pytest.raises(NodesMissing):
        gathering.gather(0.1)
    assert (
        "nodes: somebody was refused at the rendezvous, who expects another key here" in caplog.text
    )


def test_nobody_at_the_rendezvous(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    read_key(place.key_file, make=True)
    with caplog.at_level(logging.INFO):
        assert place.join(wait_s=0.5).ends() == 1
    waits = f"node 1 waits for rank 0 at 127.0.0.1:{place.port}: Connection refused"
    assert caplog.messages == [
        waits,
        f"no rank 0 at 127.0.0.1:{place.port} within 0.5 s: Connection refused",
    ]


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [(UserError("no such file"), 2, "no such file"), (MemoryError("full"), 1, "MemoryError: full")],
)
def test_what_a_rank_failed_of_stands_in_rank_0s_log(
    place: Place,
    computing: type[Computing],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    code: int,
    line: str,
) -> None:
    exits: list[tuple[str, int]] = []
    monkeypatch.setattr(node_ranks_module, "exit_at_once", lambda *given: exits.append(given))
    monkeypatch.setattr(computing, "error", error)
    gathering, joining = place.gathering(), place.join()
    ranks = gathering.gather(LONG_S)
    ranks.build("any:Any", {})
    ranks.links[0].send(DiscardCommand())
    with pytest.raises(LinkClosedError):
        ranks.links[0].receive_reply()
    until(lambda: exits)
    assert joining.ends() == code
    assert exits[0][1] == code
    assert exits[0][0].endswith(f": {line}")
    ranks.end(1)


def test_a_rank_ends_when_rank_0_vanishes(
    place: Place, computing: type[Computing], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()
    monkeypatch.setattr(rank_module, "exit_at_once", lambda *_: ended.set())
    monkeypatch.setattr(rank_module, "FAREWELL_S", 0.2)
    busy = threading.Event()
    # in a collective that nobody ends
    monkeypatch.setattr(computing, "obey", lambda *_: busy.wait(LONG_S) and None)
    gathering, _ = place.gathering(), place.join()
    ranks = gathering.gather(LONG_S)
    ranks.build("any:Any", {})
    ranks.links[0].send(DiscardCommand())
    time.sleep(0.3)
    ranks._ending.set()
    ranks._ranks[0].frames._socket.close(0)
    assert ended.wait(LONG_S)
    busy.set()
    ranks._watch.close()
    ranks._server.close()


class TestEncryptedLink:
    """Strangers at the port of a link."""

    key = NodeKey(bytes(range(32)))

    @pytest.fixture
    def served(self) -> Iterator[tuple[EncryptedFrames, int, list[EncryptedFrames]]]:
        server, lost = (
            BoardServer("127.0.0.1", secret=self.key.curve_secret(RANK_0)),
            list[EncryptedFrames](),
        )
        server.admit(OTHER_RANKS, self.key.curve_public(OTHER_RANKS))
        pair, port = server.open_pair(prepare_socket)
        self.frames, self.watch = EncryptedFrames(pair), LinkWatch(lost.append)
        yield self.frames, port, lost
        self.watch.close()
        self.frames.close()
        server.close()

    def test_strangers_change_nothing_and_the_end_is_noticed(self, served: Any) -> None:
        frames, port, lost = served
        client = EncryptedFrames.connect("127.0.0.1", port, self.key)
        client.put(b"hello")
        found: list[tuple[bytes, int]] = []
        until(lambda: found.append(one) if (one := frames.first()) else found)
        data, descriptor = found[0]
        assert data == b"hello"
        self.watch.add(frames, frames.monitor(), descriptor)
        # As a rank does: a client that nobody watches would wait for ever.
        self.watch.add(client, client.monitor())
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(said)
                time.sleep(0.3)
        thief = EncryptedFrames.connect("127.0.0.1", port, NodeKey(bytes(32)))
        thief.put(msgspec.msgpack.encode({"evil": 1}))
        time.sleep(0.3)
        thief.close()
        frames.put(b"to you")
        assert client.take() == b"to you"
        assert lost == []
        client.close()
        assert frames.closes(LONG_S)
        until(lambda: lost == [frames])
        with pytest.raises(LinkClosedError):
            RankLink(frames).receive_command()
        with pytest.raises(LinkClosedError):
            frames.put(b"too late")

    def test_frames_that_came_before_the_end_are_taken(self, served: Any) -> None:
        frames, port, _ = served
        client = EncryptedFrames.connect("127.0.0.1", port, self.key)
        self.watch.add(client, client.monitor())
        client.put(b"hello")
        until(frames.first)
        for number in range(3):
            frames.put(bytes([number]))
        frames.close()
        assert client.closes(LONG_S)
        assert [client.take() for _ in range(3)] == [b"\0", b"\1", b"\2"]
        with pytest.raises(LinkClosedError):
            client.take()
        client.close()

    @pytest.mark.parametrize("listens", [True, False])
    def test_failed_connection_ends_the_link(self, listens: bool) -> None:
        """Its port is closed by now, or the other end leaves before anybody watches."""
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
            if listens:
                listener.listen()
                client = EncryptedFrames.connect("127.0.0.1", port, self.key)
                listener.accept()[0].close()
        if not listens:
            client = EncryptedFrames.connect("127.0.0.1", port, self.key)
        time.sleep(0.3)
        watch = LinkWatch(lambda _: None)
        watch.add(client, client.monitor())
        assert client.closes(LONG_S)
        with pytest.raises(LinkClosedError):
            client.take()
        client.close()
        watch.close()

    def test_stranger_behind_the_end_blocks_nobody(self, served: Any) -> None:
        """Its event has no reader any more; ZeroMQ's thread would wait for one."""
        frames, port, _ = served
        client = EncryptedFrames.connect("127.0.0.1", port, self.key)
        client.put(b"hello")
        first: list[tuple[bytes, int]] = []
        until(lambda: first.append(one) if (one := frames.first()) else first)
        self.watch.add(frames, frames.monitor(), first[0][1])
        client.close()
        assert frames.closes(LONG_S)
        until(lambda: not self.watch._watched)
        # As many as the context has threads.
        for _ in range(2):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                stranger.settimeout(LONG_S)
                with suppress(ConnectionResetError):
                    while stranger.recv(1024):
                        pass
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.settimeout(LONG_S)
            assert stranger.recv(1) == b"\xff", "its greeting does not come"


def test_a_group_that_cannot_form_says_what_it_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    from learner.backends.ranks.rendezvous import GroupFailedError

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none7")
    meeting = Meeting(torch.distributed.HashStore(), "127.0.0.1")  # type: ignore[attr-defined]
    with pytest.raises(GroupFailedError) as error:
        join_group(meeting, 1, 2, torch.device("cpu"))
    line = str(error.value)
    assert line.startswith("gloo cannot connect rank 1 with the other 1: ")
    assert f"; interface lo (127.0.0.1), torch {torch.__version__}, " in line
    assert "GLOO_SOCKET_IFNAME=none7" in line
    assert "\n" not in line
