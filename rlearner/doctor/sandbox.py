"""Checks whether untrusted programs can run here, with the probe that reward hubs start with."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from shutil import which
from typing import Any, Final

from broker.errors import UserError
from broker.settings.preflight import PreflightFinding
from rlearner.doctor.requirements import MachineRequirements
from rlearner_sandbox import Sandbox

# The command in the probe's error.
_COMMAND: Final = re.compile(r"(?:run|with|needed): (.+)$")
_finding: Final = partial(PreflightFinding, "sandbox")


def sandbox_findings(
    needs: MachineRequirements, probe: Callable[[], Any] | None = None
) -> list[PreflightFinding]:
    """Check bubblewrap with an empty program, and user namespaces."""
    try:
        (probe or Sandbox)()
        problem = ""
    except UserError as error:
        problem = str(error)
    return [
        judge_probe(problem, _bwrap_version(), needs),
        check_namespaces(Path("/proc/sys"), os.geteuid() == 0),
    ]


def judge_probe(problem: str, version: str, needs: MachineRequirements) -> PreflightFinding:
    """Return the finding about the probe; ``problem`` is empty if a program ran."""
    if not problem:
        return _finding("bubblewrap", "ok", f"{version or 'bubblewrap'}, a program ran in it")
    command = "rewards: [{name: code, args: {sandbox: none}}]  # programs run unprotected"
    if match := _COMMAND.search(problem):
        command = match[1]
    if needs.sandbox:
        return _finding(
            "bubblewrap",
            "missing",
            f"{problem}; required by a reward named code or isolation: sandbox",
            command,
        )
    return _finding("bubblewrap", "absent", problem, command)


def check_namespaces(settings: Path, is_root: bool) -> PreflightFinding:
    """Report user namespaces, which bubblewrap needs except for root; the probe decides."""
    most = _read_setting(settings / "user/max_user_namespaces")
    allowed = _read_setting(settings / "kernel/unprivileged_userns_clone")
    note = "; root needs none" if is_root else ""
    if most in ("", "0") or allowed == "0":
        return _finding("user namespaces", "absent", f"disabled{note}")
    return _finding("user namespaces", "ok", f"at most {most}{note}")


def _read_setting(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _bwrap_version() -> str:
    path = which("bwrap")
    if path is None:
        return ""
    command = [path, "--version"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=5, check=False
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
