"""Checks whether untrusted programs can run here, with the probe that reward hubs run at their start."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from shutil import which
from typing import Final

from broker.errors import UserError
from broker.settings.preflight import PreflightFinding
from rlearner.doctor.requirements import MachineRequirements
from rlearner_sandbox import Sandbox

_COMMAND: Final = re.compile(r"(?:run|with|needed): (.+)$")  # the command in the probe's error


def sandbox_findings(needs: MachineRequirements, probe: Callable[[], None] | None = None) -> list[PreflightFinding]:
    """Check bubblewrap with an empty program, and user namespaces."""
    try:
        (probe or _probe)()
    except UserError as error:
        problem = str(error)
    else:
        problem = ""
    return [judge(problem, _version(), needs), namespaces(Path("/proc/sys"), os.geteuid() == 0)]


def judge(problem: str, version: str, needs: MachineRequirements) -> PreflightFinding:
    """Return the finding about the probe; ``problem`` is empty if a program ran."""
    if not problem:
        return PreflightFinding("sandbox", "bubblewrap", "ok", f"{version or 'bubblewrap'}, a program ran in it")
    command = (
        found[1]
        if (found := _COMMAND.search(problem))
        else "rewards: [{name: code, args: {sandbox: none}}]  # programs run unprotected"
    )
    if needs.sandbox:
        return PreflightFinding(
            "sandbox", "bubblewrap", "missing", f"{problem}; required by a reward named code", command
        )
    return PreflightFinding("sandbox", "bubblewrap", "absent", problem, command)


def namespaces(settings: Path, root: bool) -> PreflightFinding:
    """Report user namespaces, which bubblewrap needs except for root; for information, as the probe decides."""
    most, allowed = _read(settings / "user/max_user_namespaces"), _read(settings / "kernel/unprivileged_userns_clone")
    if most in ("", "0") or allowed == "0":
        return PreflightFinding(
            "sandbox", "user namespaces", "absent", "disabled" + ("; root needs none" if root else "")
        )
    return PreflightFinding(
        "sandbox", "user namespaces", "ok", f"at most {most}" + ("; root needs none" if root else "")
    )


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _probe() -> None:
    Sandbox()


def _version() -> str:
    path = which("bwrap")
    if path is None:
        return ""
    try:
        return subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=5, check=False
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
