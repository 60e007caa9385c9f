"""Selects the GPUs that a process sees (``4-7``, ``0,2``, ``cpu``, ``auto``) before torch loads."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Final, Literal

from broker.errors import UserError

PROC: Final = Path("/proc/driver/nvidia/gpus")  # one folder per GPU of the kernel driver
SMI_TIMEOUT_S: Final = 20.0
Device = Literal["cpu", "cuda", "auto"]


def parse(spec: str) -> list[int]:
    """Return the GPU numbers of a list of numbers and ranges: ``0,2`` gives [0, 2], ``4-7`` gives
    [4, 5, 6, 7].

    Raises:
        UserError: if it is anything else, a range runs backwards, or a number occurs twice.
    """
    numbers: list[int] = []
    for part in spec.split(","):
        match = re.fullmatch(r"\s*(\d{1,4})(?:\s*-\s*(\d{1,4}))?\s*", part)
        if match is None:
            raise UserError(
                "--gpus: expected cpu, auto, a list such as 0,2 or a range such as 4-7, got "
                f"{spec!r}"
            )
        first = int(match[1])
        last = int(match[2] or match[1])
        if last < first:
            raise UserError(f"--gpus {spec!r}: the range {first}-{last} runs backwards")
        numbers.extend(range(first, last + 1))
    twice = sorted({n for n in numbers if numbers.count(n) > 1})
    if twice:
        raise UserError(f"--gpus {spec!r} names GPU {twice[0]} twice")
    return numbers


def existing() -> list[int]:
    """Return the numbers of this machine's GPUs in nvidia-smi's order, without torch."""
    smi = shutil.which("nvidia-smi")
    if smi is not None:
        try:
            command = [smi, "--query-gpu=index", "--format=csv,noheader"]
            answer = subprocess.run(
                command, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            # A broken tool does not describe the hardware: read the driver's folder.
            pass
        else:
            if answer.returncode == 0:
                return sorted(int(line) for line in answer.stdout.split() if line.isdigit())
    return list(range(sum(1 for _ in PROC.iterdir()))) if PROC.is_dir() else []


def select(
    spec: str,
    environ: MutableMapping[str, str] = os.environ,
    find_gpus: Callable[[], list[int]] = existing,
) -> Device:
    """Restrict this process to some GPUs; call it before torch is imported.

    ``auto`` takes what the environment allows. Numbers are the machine's, in PCI order, whatever
    CUDA_VISIBLE_DEVICES was before.

    Returns:
        ``cpu``, ``cuda`` (numbers were given), or ``auto``.

    Raises:
        UserError: if the spec does not parse, or a GPU does not exist (names it and those that do).
    """
    if spec == "auto":
        return "auto"
    if spec == "cpu":
        environ["CUDA_VISIBLE_DEVICES"] = ""
        return "cpu"
    numbers = parse(spec)
    present = find_gpus()
    missing = [n for n in numbers if n not in present]
    if missing:
        names = f"GPU{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        have = f"it has {', '.join(map(str, present))}" if present else "it has no NVIDIA GPU"
        raise UserError(f"--gpus {spec}: {names} not on this machine; {have}")
    # nvidia-smi's order; CUDA's default is by speed.
    environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, numbers))
    return "cuda"
