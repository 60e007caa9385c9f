"""What ``rlearner start`` does on each node of several: gathers the others, or joins node 0."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from broker.errors import UserError
from broker.runtime.process import Stop, Stopped
from broker.settings.arguments import count, natural, positive
from broker.settings.run_settings import RunSettings
from broker.system import logs
from broker.system.entry import EXIT_FAULT, EXIT_USER_ERROR
from learner.nodes.key import default_path
from learner.nodes.local_ranks import RankStart, run_node, start_of
from learner.nodes.placement import Placement

if TYPE_CHECKING:
    from learner.nodes.node_ranks import NodeRanks

DEADLINE_S: Final = 600.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of several nodes; under torchrun and srun none is needed."""
    add = parser.add_argument
    add("--nnodes", metavar="N", type=count, help="nodes that train together (1)")
    add(
        "--node-rank",
        metavar="I",
        type=natural,
        help="number of this node, from 0; node 0 is the learner",
    )
    add(
        "--rendezvous",
        metavar="HOST:PORT",
        help="address of node 0 for the other nodes, and a free port there",
    )
    text = (
        "secret file of the nodes, the same on all; node 0 makes it (~/.config/rlearner/nodes.key)"
    )
    add("--nodes-key", metavar="FILE", type=Path, help=text)
    text = "how long nodes wait for each other (%(default)g)"
    add("--nodes-deadline", metavar="SECONDS", type=positive, default=DEADLINE_S, help=text)


def join_rank_0(
    placement: Placement,
    settings: RunSettings,
    num_here: int,
    options: argparse.Namespace,
    shared: list[str],
) -> int:
    """Join rank 0 with the ranks of this node, or as one of them; return the exit code.

    Args:
        shared: names of this node's devices, if it takes turns on them.
    """
    key_file = str(options.nodes_key or default_path())
    config = settings.to_plain()

    def start(local_rank: int) -> RankStart:
        return start_of(
            placement,
            local_rank,
            num_here,
            key_file=key_file,
            config=config,
            deadline_s=options.nodes_deadline,
            shared=shared,
        )

    logs.configure()
    logs.identify(role="learner", process_id=f"node-{placement.node}")
    logs.apply(options)
    if placement.local_rank is None:
        return run_node([start(local_rank) for local_rank in range(num_here)])
    # It imports torch, which a process that only starts ranks does not need.
    from learner.nodes.rank import serve_rank

    return serve_rank(start(placement.local_rank))


@dataclass
class Outcome:
    """The exit code of all nodes, and all devices on which the learner takes turns."""

    code: int = EXIT_FAULT
    shared: list[str] = field(default_factory=list)


@asynccontextmanager
async def gather_nodes(
    placement: Placement,
    settings: RunSettings,
    num_here: int,
    options: argparse.Namespace,
    stop: Stop,
    shared: list[str],
) -> AsyncIterator[Outcome]:
    """Wait for all nodes, and run the backend on their ranks while it is open.

    At the end all of them exit with the outcome's code.

    Args:
        shared: names of this node's devices, if it takes turns on them.

    Raises:
        UserError: if nodes differ, or the rendezvous cannot be opened.
        Stopped: if a stop is requested while waiting.
        NodesMissing: if not all nodes come in time.
    """
    ranks = await asyncio.to_thread(
        _gather_ranks, placement, settings, num_here, options=options, stop=stop, shared=shared
    )
    outcome = Outcome(shared=sorted({*shared, *ranks.shared}))
    try:
        from learner.backends.ranks.group import use_other_ranks

        with use_other_ranks(ranks):
            yield outcome
    except BaseException as error:
        if isinstance(error, UserError) or (
            isinstance(error, BaseExceptionGroup) and error.subgroup(UserError)
        ):
            # A supervisor does not start the nodes again: the same error would follow.
            outcome.code = EXIT_USER_ERROR
        raise
    finally:
        await asyncio.to_thread(ranks.end, outcome.code)


def _gather_ranks(
    placement: Placement,
    settings: RunSettings,
    num_here: int,
    options: argparse.Namespace,
    stop: Stop,
    shared: list[str],
) -> NodeRanks:
    # It imports torch.
    from learner.nodes.gathering import Gathering, GatheringStopped

    key_file = options.nodes_key or default_path()
    try:
        gathering = Gathering(
            placement,
            num_here,
            settings.train.ranks,
            key_file=key_file,
            config=settings.to_plain(),
            shared=shared,
        )
        return gathering.gather(options.nodes_deadline, stop.asked.is_set)
    except GatheringStopped:
        raise Stopped(stop.reason) from None
