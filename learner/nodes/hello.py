"""What each rank says of itself when it arrives, and the list of who is there; without clock and
network.
"""

from __future__ import annotations

import json
import os
import platform
import socket
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import msgspec

PACKAGES: Final = ("rlearner", "torch", "transformers")
OWN: Final = ("run.name", "run.dir")  # settings that are rank 0's alone
MAX_CHARS: Final = 80  # of a value that is shown

Seat = tuple[int, int]  # node, number of the rank on it


class Hello(msgspec.Struct, frozen=True):
    """The first message of a rank."""

    node: int
    local_rank: int
    local_size: int
    host: str
    pid: int
    versions: dict[str, str]
    config: dict[str, Any]  # resolved
    shared: list[str] = []  # names of its node's devices, if it takes turns on them

    @property
    def seat(self) -> Seat:
        """Where it sits."""
        return self.node, self.local_rank

    @property
    def name(self) -> str:
        """Node, host and process, for messages."""
        return f"node {self.node} ({self.host}, pid {self.pid})"


def greet(
    node: int, local_rank: int, local_size: int, config: dict[str, Any], shared: list[str]
) -> Hello:
    """Return this process's message."""
    return Hello(
        node,
        local_rank,
        local_size,
        socket.gethostname(),
        os.getpid(),
        _package_versions(),
        config,
        shared,
    )


def _package_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "none"
    return versions


def first_difference(first: Hello, other: Hello) -> str:
    """Return the first difference in versions or settings as a line, empty if there is none."""
    for what, one, two in (("", first.versions, other.versions), ("", first.config, other.config)):
        for key, mine, theirs in _find_differences(one, two, what):
            if key not in OWN:
                return f"{key} is {_shorten(theirs)} on {other.name}, but {_shorten(mine)} on {first.name}"
    if bool(first.shared) != bool(other.shared):
        given, lacking = (first, other) if first.shared else (other, first)
        return f"--share-gpus is given on {given.name}, but not on {lacking.name}"
    return ""


def _find_differences(mine: Any, theirs: Any, key: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for name in dict.fromkeys([*mine, *theirs]):
            yield from _find_differences(
                mine.get(name), theirs.get(name), f"{key}.{name}" if key else str(name)
            )
    elif mine != theirs:
        yield key, mine, theirs


def _shorten(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}…"


class Roll:
    """Who is there of ``num_nodes`` nodes; rank 0 is from the start.

    Attributes:
        present: messages of those who are there, by seat.
    """

    def __init__(self, num_nodes: int, rank_0: Hello) -> None:
        self._num_nodes = num_nodes
        self._rank_0 = rank_0
        self.present: dict[Seat, Hello] = {rank_0.seat: rank_0}

    def conflict(self, hello: Hello) -> str:
        """Return why a rank cannot take its seat, as a line; empty if it can."""
        if not 0 <= hello.node < self._num_nodes:
            return f"--node-rank {hello.node}: node 0 waits for {self._num_nodes} nodes, 0 to {self._num_nodes - 1}"
        if (holder := self.present.get(hello.seat)) is not None:
            return f"--node-rank {hello.node} is taken by {holder.host} (pid {holder.pid}); each node has its own"
        return ""

    def enter(self, hello: Hello) -> str:
        """Let a rank take its seat; return how it differs from rank 0, as a line that ends the
        start for all.
        """
        self.present[hello.seat] = hello
        neighbor = next(member for member in self.present.values() if member.node == hello.node)
        if neighbor.local_size != hello.local_size:
            return f"{hello.name} says that its node has {hello.local_size} ranks, {neighbor.name} {neighbor.local_size}"
        return first_difference(self._rank_0, hello)

    def leave(self, seat: Seat) -> None:
        """Empty a seat."""
        self.present.pop(seat, None)

    @property
    def complete(self) -> bool:
        """Whether all nodes are there with all their ranks."""
        return not any(self._missing(node) for node in range(self._num_nodes))

    def _missing(self, node: int) -> str:
        present = [hello for hello in self.present.values() if hello.node == node]
        if not present:
            return f"node {node}"
        lacking = sorted(
            set(range(present[0].local_size)) - {hello.local_rank for hello in present}
        )
        return (
            f"rank {', '.join(map(str, lacking))} of node {node} ({present[0].host})"
            if lacking
            else ""
        )

    def describe(self) -> str:
        """Return who is there and who is missing."""
        missing = [text for node in range(self._num_nodes) if (text := self._missing(node))]
        hosts = {hello.node: f"node {hello.node} ({hello.host})" for hello in self.present.values()}
        return f"here: {', '.join(hosts[node] for node in sorted(hosts))}; missing: {', '.join(missing) or 'none'}"

    def in_order(self) -> list[Hello]:
        """Return those who are there as ranks 0, 1, ...: neighbours share a node."""
        return [self.present[seat] for seat in sorted(self.present)]

    def wrong_size(self, size: int) -> str:
        """Return a line if the ranks are not as many as ``train.ranks``, else an empty text."""
        if len(self.present) == size:
            return ""
        sizes = {hello.node: hello.local_size for hello in self.present.values()}
        counts = ", ".join(f"{sizes[node]} on node {node}" for node in sorted(sizes))
        return f"train.ranks: {size} is not allowed; it counts the ranks of all nodes, which are {counts}"
