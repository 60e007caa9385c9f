"""Starts the ranks of one node as children, and waits for them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Final

import msgspec

from broker.contract.wire import PlainSettings
from broker.system.children import spawn
from broker.system.entry import EXIT_FAULT, EXIT_STOPPED, EXIT_USER_ERROR
from learner.nodes.placement import Placement

# After the first rank ended by itself: the others learn of it by their links, and end too.
FAREWELL_S: Final = 5.0
POLL_S: Final = 0.1
# Sent to ranks for the first signal that stops their node. Slurm signals every process of a node,
# so the same signal again would count as a second one.
FORWARDED_SIGNAL: Final = signal.SIGUSR1


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
    config: PlainSettings
    deadline_s: float
    shared: list[str] = []


def start_of(
    placement: Placement,
    local_rank: int,
    size_here: int,
    key_file: str,
    config: PlainSettings,
    deadline_s: float,
    shared: list[str],
) -> RankStart:
    """Return what a rank of a node needs."""
    return RankStart(
        placement.node,
        placement.num_nodes,
        placement.host,
        port=placement.port,
        local_rank=local_rank,
        size_here=size_here,
        key_file=key_file,
        config=config,
        deadline_s=deadline_s,
        shared=shared,
    )


def spawn_rank(start: RankStart) -> subprocess.Popen[bytes]:
    """Start the process of a rank, which ends with this one."""
    # Other users could read arguments, and a file would have to be deleted.
    memory = os.memfd_create("rank-start")
    try:
        with os.fdopen(os.dup(memory), "wb") as file:
            file.write(msgspec.msgpack.encode(start))
        os.lseek(memory, 0, os.SEEK_SET)
        command = [sys.executable, "-m", "learner.nodes.rank", str(memory)]
        # Its log goes where this process's goes.
        with os.fdopen(os.dup(2), "wb") as output:
            return spawn(command, output, pass_fds=[memory], death_signal=signal.SIGKILL)
    finally:
        os.close(memory)


def worst_code(codes: Sequence[int]) -> int:
    """Return a node's exit code from its ranks': user errors, then failures, then a stop."""
    if EXIT_USER_ERROR in codes:
        return EXIT_USER_ERROR
    # Any other code, such as that of a signal, is a failure.
    if any(code not in (0, EXIT_STOPPED) for code in codes):
        return EXIT_FAULT
    return EXIT_STOPPED if EXIT_STOPPED in codes else 0


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
            rank.send_signal(FORWARDED_SIGNAL if count == 1 else signal.SIGKILL)
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
    return worst_code([rank.returncode for rank in ranks])
