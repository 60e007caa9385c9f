"""Finds this process's place among several nodes: from options, or variables of a launcher."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from broker.errors import UserError

TORCHRUN: Final = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
SLURM: Final = (
    "SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID", "SLURM_STEP_NUM_NODES",
    "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST", "SLURM_JOB_ID", "SLURM_STEP_ID",
)  # fmt: skip
# Of Slurm's steps: below the ports that systems give out by themselves.
FIRST_PORT: Final = 15_000
NUM_PORTS: Final = 16_000


@dataclass(frozen=True)
class Placement:
    """This process among the nodes.

    Attributes:
        host: name or address of node 0, where the ranks meet.
        source: what started this process, for messages.
        local_rank: number of the rank on this node that this process is; None: it starts all ranks
            of its node.
        local_size: ranks of this node, None if the configuration decides.
        size: ranks of all nodes, None if the configuration decides.
    """

    node: int
    num_nodes: int
    host: str
    port: int
    source: str
    local_rank: int | None = None
    local_size: int | None = None
    size: int | None = None

    @property
    def leads(self) -> bool:
        """Whether this process is rank 0, the learner."""
        return self.node == 0 and not self.local_rank

    @property
    def where(self) -> str:
        """Host and port of the rendezvous."""
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


def find_placement(
    nnodes: int | None, node_rank: int | None, rendezvous: str | None, environ: Mapping[str, str]
) -> Placement | None:
    """Return the place of this process, None for a learner on one node.

    Args:
        nnodes, node_rank, rendezvous: of the command line; None if not given.

    Raises:
        UserError: if options are incomplete, or contradict each other or the environment.
    """
    if nnodes == 1:
        if node_rank:
            raise UserError(f"--node-rank {node_rank}: --nnodes 1 has only node 0")
        return None
    placement = _of_torchrun(environ) or _of_slurm(environ)
    if placement is None:
        return _of_options(nnodes, node_rank, rendezvous)
    options = (
        ("--nnodes", nnodes, placement.num_nodes),
        ("--node-rank", node_rank, placement.node),
    )
    for name, value, expected in options:
        if value is not None and value != expected:
            raise UserError(
                f"{name} {value}: {placement.source} started this process with {expected}; "
                f"leave {name} out"
            )
    if rendezvous is None:
        return placement
    host, port = parse_rendezvous(rendezvous)
    return Placement(**{**vars(placement), "host": host, "port": port})


def _of_options(
    nnodes: int | None, node_rank: int | None, rendezvous: str | None
) -> Placement | None:
    options = {"--nnodes": nnodes, "--node-rank": node_rank, "--rendezvous": rendezvous}
    if all(value is None for value in options.values()):
        return None
    if nnodes is None or node_rank is None or rendezvous is None:
        present = " and ".join(name for name, value in options.items() if value is not None)
        missing = " and ".join(name for name, value in options.items() if value is None)
        raise UserError(f"{present} without {missing}: several nodes need all three")
    if node_rank >= nnodes:
        raise UserError(
            f"--node-rank {node_rank}: with --nnodes {nnodes} nodes are numbered 0 to {nnodes - 1}"
        )
    host, port = parse_rendezvous(rendezvous)
    return Placement(node_rank, nnodes, host, port, f"--nnodes {nnodes}")


def parse_rendezvous(text: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT`` or ``[IPV6]:PORT``.

    Raises:
        UserError: if it is neither.
    """
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\s:\[\]/]+)):(\d{1,5})", text)
    if match is None or not 0 < int(match[3]) < 65536:
        raise UserError(
            f"--rendezvous {text}: expected HOST:PORT of node 0, for example 10.0.0.1:7100"
        )
    return match[1] or match[2], int(match[3])


def _of_torchrun(environ: Mapping[str, str]) -> Placement | None:
    """Return the place that torchrun gives, which starts one process per rank."""
    if (
        not all(environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        or environ["WORLD_SIZE"] == "1"
    ):
        return None
    _require_variables("torchrun", TORCHRUN, environ)
    rank, size, local_rank, local_size, node, port = (
        _read_number("torchrun", name, environ) for name in TORCHRUN if name != "MASTER_ADDR"
    )
    if local_rank >= local_size or rank >= size or size % local_size:
        values = ", ".join(f"{name}={environ[name]}" for name in TORCHRUN[:4])
        raise UserError(
            f"torchrun: {values} contradict each other; "
            "each node needs as many processes as the others"
        )
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun itself listens at the port that it names.
        port += 1
    return Placement(
        node,
        size // local_size,
        environ["MASTER_ADDR"],
        port=port,
        source="torchrun",
        local_rank=local_rank,
        local_size=local_size,
        size=size,
    )


def _of_slurm(environ: Mapping[str, str]) -> Placement | None:
    """Return the place that srun gives.

    With one task per node, a task starts its node's ranks; with several, each is a rank.
    """
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
    # Otherwise it is a shell or a batch script, not several tasks of srun.
    if not tasks.isdecimal() or int(tasks) < 2:
        return None
    _require_variables("srun", SLURM, environ)
    node, local_rank, nodes, job, step = (
        _read_number("srun", name, environ)
        for name in (
            "SLURM_NODEID",
            "SLURM_LOCALID",
            "SLURM_STEP_NUM_NODES",
            "SLURM_JOB_ID",
            "SLURM_STEP_ID",
        )
    )
    host = first_host(environ["SLURM_STEP_NODELIST"])
    size = int(tasks)
    # The same on all nodes without asking, and another one for each step of a job.
    port = FIRST_PORT + (job * 31 + step) % NUM_PORTS
    if nodes == size:
        return Placement(node, nodes, host, port, "srun")
    sizes = tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"])
    return Placement(
        node,
        nodes,
        host,
        port=port,
        source="srun",
        local_rank=local_rank,
        local_size=sizes[node],
        size=size,
    )


def first_host(hosts: str) -> str:
    """Return the first name of a list as Slurm writes it: ``gpu[03-05,9],login`` gives gpu03."""
    match = re.match(r"([^\[,]+)(?:\[(\w+)[^\]]*\])?([^,\[]*)", hosts)
    if match is None:
        raise UserError(f"srun: SLURM_STEP_NODELIST={hosts} is not a list of hosts")
    return f"{match[1]}{match[2] or ''}{match[3]}"


def tasks_per_node(text: str) -> list[int]:
    """Return the tasks of each node: from Slurm's ``2(x3),1``, [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise UserError(f"srun: SLURM_STEP_TASKS_PER_NODE={text} is not a list of numbers")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _require_variables(source: str, names: tuple[str, ...], environ: Mapping[str, str]) -> None:
    if missing := [name for name in names if not environ.get(name)]:
        raise UserError(
            f"{source}: the environment has no {', '.join(missing)}; "
            "unset its variables or set them all"
        )


def _read_number(source: str, name: str, environ: Mapping[str, str]) -> int:
    if not environ[name].isdecimal():
        raise UserError(f"{source}: {name}={environ[name]} is not a number")
    return int(environ[name])
