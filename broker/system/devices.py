"""Names the devices that processes share: GPUs by UUID, memory by host."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping
from typing import Final

from broker.system import gpus

NAME_CHARS: Final = 64  # of a key in the bucket of leases


def gpu_uuids() -> dict[int, str]:
    """Return the UUID of each GPU of this machine by its number; empty without nvidia-smi."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return {}
    command = [smi, "--query-gpu=index,uuid", "--format=csv,noheader"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=gpus.SMI_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    rows = (
        [line.partition(",") for line in answer.stdout.splitlines()]
        if answer.returncode == 0
        else []
    )
    return {int(index): uuid.strip() for index, _, uuid in rows if index.strip().isdigit()}


def device_names(
    spec: str,
    environ: Mapping[str, str] = os.environ,
    find_gpus: Callable[[], dict[int, str]] = gpu_uuids,
) -> list[str]:
    """Return the devices that ``--gpus SPEC`` selects; the host's memory without a GPU.

    ``auto`` are all GPUs that the environment allows, also those that the process will not use: a
    process then waits longer than it must.

    Raises:
        UserError: if the spec does not parse.
    """
    if spec == "cpu":
        return [host_name()]
    uuids = find_gpus()
    if spec != "auto":
        return [
            _device_name(uuids.get(number, f"{socket.gethostname()}-gpu-{number}"))
            for number in gpus.parse(spec)
        ]
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        selectors = [selector.strip() for selector in visible.split(",")]
        uuids = {
            i: uuid
            for i, uuid in uuids.items()
            if any(c == str(i) or (c and uuid.startswith(c)) for c in selectors)
        }
    return [_device_name(uuid) for uuid in uuids.values()] or [host_name()]


def host_name() -> str:
    """Return the name of this host's memory as a device."""
    return _device_name(f"{socket.gethostname()[: NAME_CHARS - 4]}-cpu")


def _device_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "-", name)[:NAME_CHARS]
