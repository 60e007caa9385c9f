"""What the provider asks of the process that makes its sandboxes, as JSON between the two."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Final

# Unused in systemd's table of uids, behind those of programs (rlearner_sandbox.command.FIRST_UID).
FIRST_UID: Final = 0x74000000
NUM_UIDS: Final = 1 << 16
# A request and its answer are one packet each.
MAX_PACKET: Final = 1 << 17


@dataclass(frozen=True)
class StartPlan:
    """A sandbox to start.

    Attributes:
        key: its number.
        lower: read-only layers, the topmost first.
        upper, work: folders of the overlay, on one file system.
        copied: a folder that is the whole root instead, where no overlay can be mounted; or "".
        shown: folders of the host that are shown read-only, and where.
        workdir: a folder that is made.
        has_range: whether the sandbox has 65,536 users of its own (a hub that is root), or one.
        watched_mib: memory that its first process watches over; 0: a cgroup does.
        cgroup: its folder, or "".
    """

    key: int
    lower: list[str]
    upper: str
    work: str
    copied: str
    shown: list[list[str]]
    workdir: str
    has_range: bool
    host_network: bool
    watched_mib: int
    cgroup: str = ""


@dataclass(frozen=True)
class RunPlan:
    """A command to run in a sandbox."""

    key: int
    argv: list[str]
    env: dict[str, str]
    workdir: str
    user: str
    processes: int
    file_bytes: int
    has_range: bool
    cgroup: str = ""


@dataclass(frozen=True)
class TaskPlan:
    """Work of our own inside a sandbox: ``pack``, ``unpack``, ``listen``, ``signal``."""

    key: int
    task: str
    argument: str = ""
    number: int = 0
    has_range: bool = False


@dataclass(frozen=True)
class EndPlan:
    """A sandbox to end."""

    key: int


Plan = StartPlan | RunPlan | TaskPlan | EndPlan
_KINDS: Final[dict[str, type[Any]]] = {
    kind.__name__: kind for kind in (StartPlan, RunPlan, TaskPlan, EndPlan)
}


def encode_plan(plan: Plan) -> bytes:
    """Return a plan as one packet."""
    return json.dumps([type(plan).__name__, asdict(plan)]).encode()


def decode_plan(packet: bytes) -> Plan:
    """Return the plan of a packet."""
    kind, fields = json.loads(packet)
    plan: Plan = _KINDS[kind](**fields)
    return plan
