"""Checks of GPUs, driver and CUDA against the installed torch, without loading torch or CUDA."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from broker.settings.preflight import PreflightFinding, Status
from rlearner.doctor.requirements import MachineRequirements
from rlearner.doctor.weight_pairs import weight_pairs

QUERY: Final = ("index", "name", "memory.total", "memory.used", "driver_version", "compute_cap")
SMI_TIMEOUT_S: Final = 15.0
# Oldest Linux driver by CUDA major version: docs.nvidia.com/deploy/cuda-compatibility, "minor
# version compatibility".
OLDEST_DRIVER: Final = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
# Share of a GPU's memory; engines take nine tenths of it by default.
MOST_USED: Final = 0.1
_finding: Final = partial(PreflightFinding, "gpu")


@dataclass(frozen=True, slots=True)
class GpuInfo:
    """One GPU as reported by nvidia-smi; memory in MiB."""

    index: int
    name: str
    total_mib: int
    used_mib: int
    driver: str
    capability: str


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """The installed torch: versions of itself, of its CUDA and of its NCCL (empty: none)."""

    version: str
    cuda: str
    nccl: str = ""


def parse_smi(text: str) -> list[GpuInfo]:
    """Parse the CSV output of ``nvidia-smi --query-gpu=…``; skip lines without a GPU."""
    gpus = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == len(QUERY) and fields[0].isdigit():
            total_mib, used_mib = (int(field) if field.isdigit() else 0 for field in fields[2:4])
            gpu = GpuInfo(
                index=int(fields[0]),
                name=fields[1],
                total_mib=total_mib,
                used_mib=used_mib,
                driver=fields[4],
                capability=fields[5],
            )
            gpus.append(gpu)
    return sorted(gpus, key=lambda gpu: gpu.index)


def parse_torch(source: str) -> TorchBuild:
    """Parse the text of ``torch/version.py``."""

    def value(name: str) -> str:
        match = re.search(rf"^{name}\b[^=]*=\s*'([^']*)'", source, re.MULTILINE)
        return match[1] if match else ""

    return TorchBuild(value("__version__"), value("cuda"))


def find_gpus() -> tuple[list[GpuInfo], str]:
    """Return the GPUs, and why they could not be queried; empty if there is just none."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return [], ""
    try:
        query = [smi, f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
        answer = subprocess.run(
            # A driver in trouble may hang, which must not hang the doctor.
            query,
            capture_output=True,
            text=True,
            timeout=SMI_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"nvidia-smi: {error}"
    problem = ""
    if answer.returncode != 0:
        problem = " ".join((answer.stdout + answer.stderr).split())[:200]
    return parse_smi(answer.stdout), problem


def find_torch() -> TorchBuild | None:
    """Return the installed torch, read from its files, or None."""
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    try:
        torch = parse_torch(
            (Path(spec.submodule_search_locations[0]) / "version.py").read_text(encoding="utf-8")
        )
    except OSError:
        return None
    return TorchBuild(torch.version, torch.cuda, _nccl_version() if torch.cuda else "")


def _nccl_version() -> str:
    for wheel in distributions():
        if (wheel.metadata["Name"] or "").lower().startswith("nvidia-nccl-cu"):
            return wheel.version
    return "built into torch"


def gpu_findings(
    gpus: Sequence[GpuInfo],
    problem: str,
    torch: TorchBuild | None,
    needs: MachineRequirements,
    num_devices: int | None = None,
) -> list[PreflightFinding]:
    """Return which GPUs there are, whether torch can use them, and whether they suffice.

    Args:
        problem: why nvidia-smi did not answer.
        num_devices: GPUs that the rollout server would find, which also queries the driver; None:
            as many as ``gpus``.
    """
    count = max(len(gpus), num_devices or 0)
    findings = _check_devices(gpus, problem, needs, count)
    if torch is not None:
        findings.append(_check_cuda(gpus, torch, needs, count))
    findings.append(_nccl_finding(torch, count))
    return findings + _check_weights(torch, needs, count)


def gpu_obstacle(gpus: Sequence[GpuInfo], problem: str, torch: TorchBuild | None) -> str:
    """Return why nothing can be measured on these GPUs, with what to do; empty if it can.

    Args:
        problem: why nvidia-smi did not answer.
    """
    if problem:
        return f"the driver does not answer: {problem}"
    if not gpus:
        return (
            "this machine has no NVIDIA GPU, or no driver for it; "
            "--cpu runs the steps small without one"
        )
    if torch is None or not torch.cuda:
        return (
            f"torch {torch.version if torch else ''} is built without CUDA; install its CUDA build"
        )
    if (least := too_old_for(gpus, torch)) is not None:
        return (
            f"driver {gpus[0].driver} is too old: torch {torch.version} for CUDA {torch.cuda} "
            f"needs {least} or newer"
        )
    for gpu in gpus:
        if _is_busy(gpu):
            return (
                f"GPU {gpu.index} is in use by other processes "
                f"({gpu.used_mib} of {gpu.total_mib} MiB); stop them, or measure anyway with --busy"
            )
    return ""


def too_old_for(gpus: Sequence[GpuInfo], torch: TorchBuild) -> str | None:
    """Return the oldest driver that this torch needs if one of the GPUs has an older one."""
    least = OLDEST_DRIVER.get(int(torch.cuda.partition(".")[0]))
    if least is None or all(_version_numbers(gpu.driver)[:2] >= least for gpu in gpus):
        return None
    return ".".join(map(str, least))


def _is_busy(gpu: GpuInfo) -> bool:
    return gpu.total_mib > 0 and gpu.used_mib > MOST_USED * gpu.total_mib


def _check_weights(
    torch: TorchBuild | None, needs: MachineRequirements, count: int
) -> list[PreflightFinding]:
    """Return how weights will travel to servers at each place; a pair without a way is missing."""
    can_use_gpus = torch is not None and bool(torch.cuda)
    pairs = weight_pairs(needs.weights, count * can_use_gpus)
    # The last pair is another host, which a run may not have.
    is_unreachable = not any(pair.carrier for pair in pairs[:-1])
    findings = []
    for pair in pairs:
        server = f"a server with engine {needs.weights.engine} {pair.place}"
        remedy = "train.weights_backend=auto"
        if pair.carrier is None:
            setting = f"train.weights_backend={needs.weights.setting}"
            text = f"{server} gets none by {setting}: {pair.reason}"
            status: Status = "missing" if is_unreachable else "absent"
            findings.append(_finding("weights", status, text, remedy))
        elif pair.carrier == "ipc":
            text = f"{server}: ipc, {pair.reason}; run with one H100 only"
            findings.append(_finding("weights", "warning", text, f"{remedy}  # if it fails here"))
        else:
            findings.append(_finding("weights", "ok", f"{server}: {pair.carrier}, {pair.reason}"))
    return findings


def _check_devices(
    gpus: Sequence[GpuInfo], problem: str, needs: MachineRequirements, count: int
) -> list[PreflightFinding]:
    if problem:
        remedy = "nvidia-smi  # must list the GPUs; fix the driver"
        return [_finding("driver", "missing" if needs.cuda else "warning", problem, remedy)]
    if not count:
        if not (needs.num_gpus or needs.cuda):
            return [_finding("GPUs", "absent", "no NVIDIA GPU on this machine")]
        remedy = (
            "rlearner doctor … train.device=auto rollout.engine=hf  "
            "# or a machine with an NVIDIA GPU"
        )
        return [_finding("GPUs", "missing", "no NVIDIA GPU on this machine", remedy)]
    findings = []
    if count < needs.num_gpus:
        remedy = f"rlearner start … train.ranks={count}  # or smaller sizes in rollout.engine_args"
        text = f"{count}, but the configuration needs {needs.num_gpus}"
        findings.append(_finding("GPUs", "missing", text, remedy))
    for gpu in gpus:
        text = (
            f"{gpu.name}, {gpu.total_mib / 1024:.0f} GiB, driver {gpu.driver}, "
            f"compute capability {gpu.capability}"
        )
        if _is_busy(gpu):
            text += f"; {gpu.used_mib / 1024:.1f} GiB in use by other processes"
            remedy = (
                "nvidia-smi --query-compute-apps=pid,used_memory,name --format=csv  "
                "# stop those, or see --gpus"
            )
            findings.append(_finding(f"GPU {gpu.index}", "warning", text, remedy))
        else:
            findings.append(_finding(f"GPU {gpu.index}", "ok", text))
    return findings


def _check_cuda(
    gpus: Sequence[GpuInfo], torch: TorchBuild, needs: MachineRequirements, count: int
) -> PreflightFinding:
    if not torch.cuda:
        text = f"torch {torch.version} is built without CUDA"
        build = f"torch=={torch.version.partition('+')[0]}"
        remedy = (
            f"pip install --force-reinstall {build}  "
            f"# the CUDA build; in the source folder: make setup TORCH={build}"
        )
        if needs.cuda:
            return _finding("CUDA", "missing", text, remedy)
        if count:
            return _finding("CUDA", "warning", f"{text}, so the GPUs stay idle", remedy)
        return _finding("CUDA", "absent", text)
    text = f"torch {torch.version} is built for CUDA {torch.cuda}"
    if (least := too_old_for(gpus, torch)) is not None:
        text += f", which needs driver {least} or newer, not {min(gpu.driver for gpu in gpus)}"
        remedy = "apt-get install --only-upgrade nvidia-driver"
        return _finding("CUDA", "missing" if needs.cuda else "warning", text, remedy)
    return _finding("CUDA", "ok", text)


def _nccl_finding(torch: TorchBuild | None, count: int) -> PreflightFinding:
    if torch is None or not torch.cuda:
        return _finding("NCCL", "absent", "not in this torch; weights go by gloo")
    if count > 1:
        return _finding("NCCL", "ok", torch.nccl)
    return _finding("NCCL", "ok", f"{torch.nccl}; used only with two GPUs or more")


def _version_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))
