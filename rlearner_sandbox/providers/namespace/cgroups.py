"""Finds a cgroup (version 2) that is delegated to this process, and makes one per sandbox."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Final

from rlearner_sandbox.providers.base import SandboxSpec

# Names the folder where nothing marks it, as in a container.
VARIABLE: Final = "RL_SANDBOX_CGROUP"
NEEDED: Final = ("memory", "pids")
PERIOD_US: Final = 100_000
_GONE_S: Final = 2.0


def delegated_folder(
    mounts: Path = Path("/proc/self/mounts"), membership: Path = Path("/proc/self/cgroup")
) -> Path | None:
    """Return the folder in which this process may make cgroups with limits; None: there is none.

    It is ``RL_SANDBOX_CGROUP``, or what systemd has delegated (``Delegate=yes`` with
    ``DelegateSubgroup=``, so that the folder itself has no processes).
    """
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named) if _enable_controllers(Path(named)) else None
    lines = [line.split() for line in mounts.read_text(encoding="utf-8").splitlines()]
    tree = next((Path(line[1]) for line in lines if line[2] == "cgroup2"), None)
    paths = membership.read_text(encoding="utf-8").splitlines()
    path = next((line[3:] for line in paths if line.startswith("0::")), "")
    if tree is None or path in ("", "/"):
        return None
    own = tree / path.lstrip("/")
    for folder in (own.parent, own):
        if _is_delegated(folder) and _enable_controllers(folder):
            return folder
    return None


def _is_delegated(folder: Path) -> bool:
    for name in ("user.delegate", "trusted.delegate"):
        with contextlib.suppress(OSError):
            if os.getxattr(folder, name) == b"1":
                return True
    return False


def _enable_controllers(folder: Path) -> bool:
    try:
        present = (folder / "cgroup.controllers").read_text(encoding="ascii").split()
        if not set(NEEDED) <= set(present):
            return False
        enabled = (folder / "cgroup.subtree_control").read_text(encoding="ascii").split()
        for name in (*NEEDED, "cpu"):
            if name in present and name not in enabled:
                (folder / "cgroup.subtree_control").write_text(f"+{name}", encoding="ascii")
    except OSError:
        # The folder has processes, or belongs to somebody else.
        return False
    return True


def make_cgroup(parent: Path, name: str, spec: SandboxSpec) -> Path:
    """Make the cgroup of a sandbox, with its limits."""
    folder = parent / name
    folder.mkdir()
    (folder / "memory.max").write_text(str(spec.memory_mib << 20), encoding="ascii")
    (folder / "pids.max").write_text(str(spec.processes + 2), encoding="ascii")
    # Not every kernel has these two.
    optional = {
        "memory.swap.max": "0",
        "cpu.max": f"{int(spec.cpus * PERIOD_US)} {PERIOD_US}",
    }
    for file, value in optional.items():
        with contextlib.suppress(OSError):
            (folder / file).write_text(value, encoding="ascii")
    return folder


def remove_cgroup(folder: Path) -> None:
    """End what is left in a cgroup and remove it."""
    with contextlib.suppress(OSError):
        (folder / "cgroup.kill").write_text("1", encoding="ascii")
    deadline = time.monotonic() + _GONE_S
    while folder.is_dir() and time.monotonic() < deadline:
        try:
            folder.rmdir()
        except OSError:
            time.sleep(0.01)
