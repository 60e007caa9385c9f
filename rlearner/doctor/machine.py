"""Checks of processors, memory, open files and disk against a configuration's needs."""

from __future__ import annotations

import json
import os
import resource
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from broker.settings.preflight import PreflightFinding
from rlearner.doctor.requirements import MachineRequirements

GIB: Final = 1 << 30
# NCCL and engines put their buffers in /dev/shm; containers give 64 MiB.
SHM_BYTES: Final = GIB
# Logs, metrics, the broker's streams.
SPARE_BYTES: Final = 2 * GIB
# Of one parameter in a checkpoint: float32 master weight and two moments.
ADAM_BYTES: Final = 12
_finding: Final = partial(PreflightFinding, "machine")


@dataclass(frozen=True, slots=True)
class MachineResources:
    """Resources of this machine, from the kernel.

    Attributes:
        nofile: soft and hard limit of open files.
        disk_free, shm_bytes: bytes free in the runs' folder, and the size of /dev/shm; None if
            unknown.
        disk_of: the folder that was measured: the nearest that exists.
    """

    cores: int
    memory_bytes: int
    available_bytes: int
    nofile: tuple[int, int]
    disk_free: int | None
    disk_of: str
    shm_bytes: int | None


def measure_machine(run_dir: str) -> MachineResources:
    """Measure this machine."""
    import psutil

    memory = psutil.virtual_memory()
    folder = str(nearest_folder(Path(run_dir).absolute()))
    disk = _disk_usage(folder)
    shm = _disk_usage("/dev/shm")
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:  # macOS
        cores = os.cpu_count() or 1
    return MachineResources(
        cores=cores,
        memory_bytes=memory.total,
        available_bytes=memory.available,
        nofile=resource.getrlimit(resource.RLIMIT_NOFILE),
        disk_free=disk and disk.free,
        disk_of=folder,
        shm_bytes=shm and shm.total,
    )


def nearest_folder(folder: Path) -> Path:
    """Return the folder itself, or its first visible parent."""
    return next(path for path in (folder, *folder.parents) if os.path.exists(path))


def _disk_usage(path: str) -> Any:
    try:
        return shutil.disk_usage(path)
    except OSError:
        return None


def model_bytes(path: str | None) -> tuple[int, int]:
    """Return the bytes of a local model's weights and of one parameter; (0, 4) if not local."""
    if not path or not Path(path).expanduser().is_dir():
        return 0, 4
    folder = Path(path).expanduser()
    files = [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]
    size = sum(file.stat().st_size for file in files)
    try:
        config: Any = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    except (OSError, ValueError, AttributeError):
        dtype = "float32"
    if "16" in dtype:
        return size, 2
    return size, 1 if "float8" in dtype else 4


def machine_findings(
    machine: MachineResources, needs: MachineRequirements, weights: tuple[int, int] = (0, 4)
) -> list[PreflightFinding]:
    """Return the findings about a machine; for ``weights`` see ``model_bytes``."""
    memory = f"{machine.available_bytes / GIB:.1f} of {machine.memory_bytes / GIB:.1f} GiB free"
    return [
        _finding("cores", "ok", str(machine.cores)),
        _finding("memory", "ok", memory),
        _check_open_files(machine.nofile, needs),
        _check_disk(machine, needs, weights),
        _check_shared_memory(machine.shm_bytes, needs),
    ]


def _check_open_files(limits: tuple[int, int], needs: MachineRequirements) -> PreflightFinding:
    soft, hard = limits
    text = f"{_format_limit(soft)} open files, at most {_format_limit(hard)}"
    if _is_enough(soft, needs.nofile):
        return _finding("open files", "ok", text)
    text += f"; this configuration may need {needs.nofile}"
    if _is_enough(hard, needs.nofile):
        return _finding("open files", "missing", text, f"ulimit -n {needs.nofile}")
    line = f"echo '* - nofile {needs.nofile}' >> /etc/security/limits.conf"
    return _finding(
        "open files",
        "missing",
        text,
        f"{line}  # as root, then log in again; or a smaller envhub.n",
    )


def _format_limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _is_enough(limit: int, needed: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= needed


def _check_disk(
    machine: MachineResources, needs: MachineRequirements, weights: tuple[int, int]
) -> PreflightFinding:
    if machine.disk_free is None:
        text = f"{machine.disk_of}: the free space is unknown"
        return _finding("disk", "warning", text, f"df -h {machine.disk_of}")
    size, width = weights
    checkpoint_bytes = 0
    # A small enough model is also kept in Hugging Face format.
    if size <= needs.whole_gib * GIB:
        checkpoint_bytes += size
    # Adapters are tiny compared with the model.
    if "lora" not in needs.plugins.values():
        checkpoint_bytes += size + size // width * ADAM_BYTES
    needed = SPARE_BYTES + needs.checkpoints * checkpoint_bytes
    text = f"{machine.disk_free / GIB:.1f} GiB free in {machine.disk_of}"
    if machine.disk_free >= needed:
        return _finding("disk", "ok", text)
    remedy = (
        f"df -h {machine.disk_of}  # free space there, or choose another disk with run.dir=FOLDER"
    )
    if size and machine.disk_free < needed - SPARE_BYTES:
        checkpoints = (
            f"{needs.checkpoints} checkpoints with their optimizer need about "
            f"{needed / GIB:.1f} GiB"
        )
        return _finding("disk", "missing", f"{text}; {checkpoints}", remedy)
    return _finding("disk", "warning", f"{text}; a run needs about {needed / GIB:.1f} GiB", remedy)


def _check_shared_memory(size: int | None, needs: MachineRequirements) -> PreflightFinding:
    remedy = "mount -o remount,size=8G /dev/shm  # as root; start a container with --shm-size=8g"
    name = "/dev/shm"
    if size is None:
        if needs.shared_memory:
            return _finding(name, "warning", "not there", remedy)
        return _finding(name, "absent", "not there")
    text = f"{size / GIB:.2f} GiB"
    if size >= SHM_BYTES or not needs.shared_memory:
        return _finding(name, "ok", text)
    return _finding(
        name,
        "warning",
        f"{text}; processes that share a model over NCCL or gloo may need more",
        remedy,
    )
