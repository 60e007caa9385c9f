"""Starts the ranks of one node as children, and waits for them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any, Final

import msgspec

from broker.system.children import spawn
from broker.system.entry import EXIT_FAULT, EXIT_STOPPED, EXIT_USER_ERROR
from learner.nodes.placement import Placement

FAREWELL_S: Final = 5.0  # after the first rank ended by itself
POLL_S: Final = 0.1
FORWARDED: Final = signal.SIGUSR1  # to ranks, for the first signal that stops their node


class RankStart(msgspec.Struct, frozen=True):
    """What a rank needs to join, passed to its process in memory.

    Attributes:
        size_here: ranks of its node.
        config: resolved, compared to rank 0's.
        deadline_s: how long it waits for rank 0.
        shared: names of its node's devices, if it takes turns on them.
    """

    node: int
    num_nodes: int
    host: str
    port: int
    local_rank: int
    size_here: int
    key_file: str
    config: dict[str, Any]
    deadline_s: float
    shared: list[str] = []


def start_of(
    placement: Placement,
    local_rank: int,
    size_here: int,
    key_file: str,
    config: dict[str, Any],
    deadline_s: float,
    shared: list[str],
) -> RankStart:
    """Return what a rank of a node needs."""
    found = (placement.node, placement.num_nodes, placement.host, placement.port)
    return RankStart(*found, local_rank, size_here, key_file, config, deadline_s, shared)


def spawn_rank(start: RankStart) -> subprocess.Popen[bytes]:
    """Start the process of a rank, which ends with this one."""
    memory = os.memfd_create("rank-start")
    try:
        with os.fdopen(os.dup(memory), "wb") as file:
            file.write(msgspec.msgpack.encode(start))
        os.lseek(memory, 0, os.SEEK_SET)
        command = [sys.executable, "-m", "learner.nodes.rank", str(memory)]
        with os.fdopen(os.dup(2), "wb") as output:  # its log goes where this process's goes
            return spawn(command, output, pass_fds=[memory], death_signal=signal.SIGKILL)
    finally:
        os.close(memory)


def worst(codes: Sequence[int]) -> int:
    """Return the exit code of a node from those of its ranks: user errors, then failures, then a
    stop.
    """
    for code in (EXIT_USER_ERROR, EXIT_FAULT, EXIT_STOPPED):
        if code in codes or (
            code == EXIT_FAULT and any(rank_code not in (0, EXIT_STOPPED) for rank_code in codes)
        ):
            return code
    return 0


def run_node(starts: Sequence[RankStart]) -> int:
    """Start the ranks of a node and return its exit code.

    The first signal goes to the ranks: those that have joined wait for rank 0 to end the run. A
    second one ends them.
    """
    ranks = [spawn_rank(start) for start in starts]
    count = 0

    def forward(number: int, _: FrameType | None) -> None:
        nonlocal count
        count += 1
        for rank in ranks:
            rank.send_signal(FORWARDED if count == 1 else signal.SIGKILL)
        if count > 1:
            os._exit(EXIT_STOPPED)

    handlers = {
        number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        return _wait_for_ranks(ranks)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _wait_for_ranks(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    deadline: float | None = None
    while any(rank.poll() is None for rank in ranks):
        if deadline is None and any(rank.returncode is not None for rank in ranks):
            deadline = time.monotonic() + FAREWELL_S
        if deadline is not None and time.monotonic() > deadline:
            for rank in ranks:
                rank.kill()
        time.sleep(POLL_S)
    return worst([rank.returncode for rank in ranks])
