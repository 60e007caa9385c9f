"""Rank 0's side: waits until all nodes are there, and notices when one of them is gone."""

from __future__ import annotations

import logging
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from broker.contract.wire import PlainSettings
from broker.errors import NodesMissing, RlearnerError, UserError
from broker.system.connections import addresses
from broker.weights.rendezvous.board_server import BoardServer
from learner.backends.ranks.link import LinkClosedError, RankLink
from learner.backends.ranks.messages import EndCommand
from learner.nodes.encrypted_link import (
    OTHER_RANKS,
    RANK_0,
    EncryptedFrames,
    LinkWatch,
    prepare_socket,
)
from learner.nodes.hello import Hello, Roll, make_hello
from learner.nodes.key import read_key
from learner.nodes.local_ranks import spawn_rank, start_of
from learner.nodes.meeting_keys import ARRIVALS, Arrival, answer_key, parse_arrivals
from learner.nodes.node_ranks import NodeRanks, RemoteRank
from learner.nodes.placement import Placement

log = logging.getLogger(__name__)

POLL_S: Final = 0.1
# Nodes often start a few seconds apart, which needs no line in the log.
FIRST_LIST_S: Final = 5.0
LIST_EVERY_S: Final = 15.0
STORE_S: Final = 60.0


class GatheringStopped(RlearnerError):
    """A stop was requested before all nodes were there."""


def own_address(host: str) -> str:
    """Return the address of this host that a name has for the other nodes; node 0 listens there.

    Raises:
        UserError: if the name is unknown or not this host's.
    """
    try:
        candidates = list(
            dict.fromkeys(
                str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            )
        )
    except OSError as error:
        raise UserError(f"--rendezvous {host}: {error.strerror or error}") from None
    own = [
        address for interface_addresses in addresses().values() for address in interface_addresses
    ]
    matches = [address for address in candidates if address in own or address.startswith("127.")]
    if not matches:
        has = ", ".join(address for address in own if address not in ("127.0.0.1", "::1"))
        raise UserError(
            f"--rendezvous {host}: node 0 must be there, but this host has {has or 'no address'}"
        )
    # Other hosts cannot reach the loopback addresses.
    return min(matches, key=lambda address: address.startswith("127.") or address == "::1")


class Gathering:
    """The rendezvous of one incarnation.

    Args:
        size_here: ranks of this node.
        size: ranks of all nodes.
        config: resolved.
        shared: names of this node's devices, if it takes turns on them.

    Raises:
        UserError: if the rendezvous cannot be opened, or the key cannot be read.
    """

    def __init__(
        self,
        placement: Placement,
        size_here: int,
        size: int,
        key_file: Path,
        config: PlainSettings,
        shared: Sequence[str] = (),
    ) -> None:
        self._placement = placement
        self._size_here = size_here
        self._size = size
        self._config = config
        self._key_file = key_file
        self._shared = list(shared)
        key = read_key(key_file, make=True)
        self._address = own_address(placement.host)
        try:
            self._server = BoardServer(
                self._address, placement.port, secret=key.curve_secret(RANK_0), name="nodes"
            )
        except OSError as error:
            raise UserError(
                f"--rendezvous {placement.where}: cannot listen there: {error.strerror}"
            ) from None
        self._server.admit(OTHER_RANKS, key.curve_public(OTHER_RANKS))
        self._store = self._server.store(STORE_S)
        self._roll = Roll(placement.num_nodes, make_hello(0, 0, size_here, config, self._shared))
        self._num_read = 0
        self._waiting: dict[EncryptedFrames, RankLink] = {}
        self._ranks: dict[tuple[int, int], RemoteRank] = {}
        self._lost: list[EncryptedFrames] = []
        self._watch = LinkWatch(self._lost.append)
        self._children: list[subprocess.Popen[bytes]] = []

    def gather(
        self, deadline_s: float, is_stopped: Callable[[], bool] = lambda: False
    ) -> NodeRanks:
        """Wait for all ranks and return them.

        Raises:
            UserError: if a rank differs in versions or settings, or the nodes have not as many
                ranks as configured.
            NodesMissing: if not all are there in time.
            GatheringStopped: if ``stopped`` says so.
        """
        try:
            self._gather(deadline_s, is_stopped)
        except UserError as error:
            self._abandon(2, str(error))
            raise
        except BaseException:
            # Whatever ends the wait: the ranks that are there must end, too.
            self._abandon(1)
            raise
        log.info("all ranks are there; %s", self._roll.describe())
        return self._hand_over([self._ranks[hello.seat] for hello in self._roll.in_order()[1:]])

    def _hand_over(self, ranks: list[RemoteRank]) -> NodeRanks:
        for link in self._waiting.values():
            link.close()
        node_ranks = NodeRanks(
            self._server,
            self._address,
            self._size_here,
            ranks=ranks,
            children=self._children,
            watch=self._watch,
        )
        self._watch.on_lost = node_ranks.lose
        # Those lost before the assignment above.
        for frames in self._lost:
            node_ranks.lose(frames)
        return node_ranks

    def _gather(self, deadline_s: float, is_stopped: Callable[[], bool]) -> None:
        # Under torchrun and srun the launcher has started the other ranks of this node.
        if self._placement.local_rank is None:
            for local_rank in range(1, self._size_here):
                start = start_of(
                    self._placement,
                    local_rank,
                    self._size_here,
                    key_file=str(self._key_file),
                    config=self._config,
                    deadline_s=deadline_s,
                    shared=self._shared,
                )
                self._children.append(spawn_rank(start))
        began = time.monotonic()
        list_at = began + FIRST_LIST_S
        deadline = began + deadline_s
        while not self._roll.complete:
            if is_stopped():
                raise GatheringStopped("stopped while waiting for the other nodes")
            now = time.monotonic()
            if now > deadline:
                raise NodesMissing(
                    f"not all nodes came within {deadline_s:g} s; {self._roll.describe()}"
                )
            if now >= list_at:
                list_at = now + LIST_EVERY_S
                log.info("waiting for the other nodes; %s", self._roll.describe())
            self._read_arrivals()
            for frames in list(self._waiting):
                self._read_hello(frames)
            while self._lost:
                self._forget(self._lost.pop())
            for child in self._children:
                if child.poll() is not None:
                    raise NodesMissing(
                        f"a rank of this node (pid {child.pid}) ended with code {child.returncode}"
                    )
            time.sleep(POLL_S)
        if problem := self._roll.wrong_size(self._size):
            raise UserError(problem)

    def _read_arrivals(self) -> None:
        value = self._store.peek(ARRIVALS)
        all_arrivals = [] if value is None else parse_arrivals(value)
        for arrival in all_arrivals[self._num_read :]:
            self._answer(arrival)
        self._num_read = len(all_arrivals)

    def _answer(self, arrival: Arrival) -> None:
        pair, port = self._server.open_pair(prepare_socket)
        frames = EncryptedFrames(pair)
        self._waiting[frames] = RankLink(frames)
        self._store.set(answer_key(arrival.token), str(port))

    def _read_hello(self, frames: EncryptedFrames) -> None:
        if (first := frames.first()) is None:
            return
        link = self._waiting.pop(frames)
        data, descriptor = first
        hello = msgspec.msgpack.decode(data, type=Hello)
        if problem := self._roll.conflict(hello):
            log.warning("%s was sent away: %s", hello.name, problem)
            with suppress(LinkClosedError):
                link.send(EndCommand(2, problem))
            link.close()
            return
        self._watch.add(frames, frames.monitor(), descriptor)
        self._ranks[hello.seat] = RemoteRank(hello, link, frames)
        if problem := self._roll.enter(hello):
            raise UserError(problem)

    def _forget(self, frames: EncryptedFrames) -> None:
        for seat, rank in list(self._ranks.items()):
            if rank.frames is frames:
                log.warning("%s has left again", rank.hello.name)
                rank.link.close()
                del self._ranks[seat]
                self._roll.leave(seat)

    def _abandon(self, code: int, reason: str = "") -> None:
        """End the ranks that are there, and close."""
        joined = {rank.hello.pid for seat, rank in self._ranks.items() if seat[0] == 0}
        # Ranks that have joined are ended by their links, with a reason.
        for child in self._children:
            if child.pid not in joined:
                child.terminate()
        self._lost.clear()
        self._hand_over(list(self._ranks.values())).end(code, reason)
