"""The first message of each rank, and the list of the ranks that are there; pure."""

from __future__ import annotations

import json
import os
import platform
import socket
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from typing import Any, Final

import msgspec

from broker.contract.wire import PlainSettings

# Packages whose versions must be the same on all nodes.
PACKAGES: Final = ("rlearner", "torch", "transformers")
# Settings that only rank 0 uses, and that may differ.
OWN: Final = ("run.name", "run.dir")
# Of a value in a message.
MAX_CHARS: Final = 80

# Node, and number of the rank on it.
Seat = tuple[int, int]


class Hello(msgspec.Struct, frozen=True):
    """The first message of a rank."""

    node: int
    local_rank: int
    local_size: int
    host: str
    pid: int
    versions: dict[str, str]
    config: PlainSettings  # resolved
    shared: list[str] = []  # names of its node's devices, if it takes turns on them

    @property
    def seat(self) -> Seat:
        """Node, and number of the rank on it."""
        return self.node, self.local_rank

    @property
    def name(self) -> str:
        """Node, host and process, for messages."""
        return f"node {self.node} ({self.host}, pid {self.pid})"


def make_hello(
    node: int, local_rank: int, local_size: int, config: PlainSettings, shared: list[str]
) -> Hello:
    """Return this process's message."""
    return Hello(
        node,
        local_rank,
        local_size,
        host=socket.gethostname(),
        pid=os.getpid(),
        versions=_package_versions(),
        config=config,
        shared=shared,
    )


def _package_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "none"
    return versions


def first_difference(first: Hello, second: Hello) -> str:
    """Return the first difference in versions or settings as a line, empty if there is none."""
    differences = chain(
        _find_differences(first.versions, second.versions, ""),
        _find_differences(first.config, second.config, ""),
    )
    for key, mine, theirs in differences:
        if key not in OWN:
            values = f"{_shorten(theirs)} on {second.name}, but {_shorten(mine)} on {first.name}"
            return f"{key} is {values}"
    if first.shared and not second.shared:
        return f"--share-gpus is given on {first.name}, but not on {second.name}"
    if second.shared and not first.shared:
        return f"--share-gpus is given on {second.name}, but not on {first.name}"
    return ""


def _find_differences(mine: Any, theirs: Any, key: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for name in dict.fromkeys([*mine, *theirs]):
            path = f"{key}.{name}".removeprefix(".")
            yield from _find_differences(mine.get(name), theirs.get(name), path)
    elif mine != theirs:
        yield key, mine, theirs


def _shorten(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    if len(text) <= MAX_CHARS:
        return text
    return f"{text[:MAX_CHARS]}…"


class Roll:
    """Which ranks of ``num_nodes`` nodes are there; rank 0 is from the start.

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
            nodes = f"{self._num_nodes} nodes, 0 to {self._num_nodes - 1}"
            return f"--node-rank {hello.node}: node 0 waits for {nodes}"
        if (holder := self.present.get(hello.seat)) is not None:
            process = f"{holder.host} (pid {holder.pid})"
            return f"--node-rank {hello.node} is taken by {process}; each node has its own"
        return ""

    def enter(self, hello: Hello) -> str:
        """Let a rank take its seat; return how it differs from rank 0, empty if it does not."""
        self.present[hello.seat] = hello
        neighbor = next(member for member in self.present.values() if member.node == hello.node)
        if neighbor.local_size != hello.local_size:
            return (
                f"{hello.name} says that its node has {hello.local_size} ranks, "
                f"{neighbor.name} {neighbor.local_size}"
            )
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
        if lacking:
            return f"rank {', '.join(map(str, lacking))} of node {node} ({present[0].host})"
        return ""

    def describe(self) -> str:
        """Return who is there and who is missing."""
        missing = [text for node in range(self._num_nodes) if (text := self._missing(node))]
        hosts = {hello.node: f"node {hello.node} ({hello.host})" for hello in self.present.values()}
        names = ", ".join(hosts[node] for node in sorted(hosts))
        return f"here: {names}; missing: {', '.join(missing) or 'none'}"

    def in_order(self) -> list[Hello]:
        """Return the messages in the order of ranks, which follow each other on a node."""
        return [self.present[seat] for seat in sorted(self.present)]

    def wrong_size(self, size: int) -> str:
        """Return a line if the ranks are not as many as ``train.ranks``, else an empty text."""
        if len(self.present) == size:
            return ""
        sizes = {hello.node: hello.local_size for hello in self.present.values()}
        counts = ", ".join(f"{sizes[node]} on node {node}" for node in sorted(sizes))
        problem = f"train.ranks: {size} is not allowed"
        return f"{problem}; it counts the ranks of all nodes, which are {counts}"
