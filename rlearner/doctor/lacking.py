"""Checks what a configuration needs on this machine, for the doctor and before a start."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from broker.errors import NotInstalled
from broker.settings.preflight import Finding
from broker.settings.registry import resolve
from broker.system.gpus import existing
from rlearner.doctor import broker_side, hardware, packages, sandbox
from rlearner.doctor.needs import Needs, needs
from rlearner.doctor.references import reference_findings

# Each role's own checks, by name, as roles do not import each other.
ROLES: Final = ("rollout.preflight:look", "envhub.preflight:look", "rewardhub.preflight:look")
OTHERS: Final = ("rollout.", "domains.")  # settings whose packages the learner does not need

Look = Callable[[], list[Finding]]


def looks(config: dict[str, Any], wanted: Needs) -> list[Look]:
    """Return the checks of packages, programs and each role's own part, to call in threads.

    Args:
        config: validated.
        wanted: its needs.
    """
    project = packages.find_project()
    return [
        lambda: [*packages.program_findings(wanted.programs), *tools(project, wanted)],
        *(_role(name, config) for name in ROLES if config.get("domains")),
        *([lambda: reference_findings(config)] if config.get("domains") else []),
    ]


def _role(name: str, config: dict[str, Any]) -> Look:
    return lambda: list(resolve("looks", name, {})(config))


def tools(project: packages.Project, wanted: Needs) -> list[Finding]:
    """Check the packages of engines, trainers and extras."""
    plugins = {**wanted.plugins, **({"a data file": "parquet"} if wanted.parquet else {})}
    return packages.tool_findings(project, plugins, gpus=bool(existing()))


def gpus(wanted: Needs) -> list[Finding]:
    """Check GPUs, driver and CUDA, and how weights would travel between GPUs."""
    return hardware.gpu_findings(*hardware.find_gpus(), hardware.find_torch(), wanted, len(existing()))


def of_fleet(config: dict[str, Any]) -> list[Finding]:
    """Return what would stop or disturb a complete run on this machine.

    Args:
        config: validated, of a run.
    """
    wanted = needs(config)
    asked: list[Look] = [lambda: broker_side.port_findings(wanted), lambda: gpus(wanted)]
    if wanted.sandbox:
        asked.append(lambda: sandbox.sandbox_findings(wanted))
    with ThreadPoolExecutor(max_workers=4) as pool:
        running = [pool.submit(look) for look in [*asked, *looks(config, wanted)]]
        return [finding for each in running for finding in each.result() if finding.status in ("missing", "warning")]


def settled(config: dict[str, Any]) -> list[str]:
    """Return overrides for a run on this machine: host memory for weights that NCCL cannot carry.

    Args:
        config: validated, of a run.
    """
    if config["train"].get("weights_backend") not in (None, "auto"):
        return []
    return [finding.mend for finding in gpus(needs(config)) if finding.name == "weights" and finding.status == "missing"]


def of_learner(config: dict[str, Any]) -> list[Finding]:
    """Return what would stop the learner or offline training.

    Args:
        config: validated.
    """
    wanted = needs(config)
    own = {key: name for key, name in wanted.plugins.items() if not key.startswith(OTHERS)}
    found = tools(packages.find_project(), Needs(plugins=own, parquet=wanted.parquet))
    return [finding for finding in found if finding.status == "missing"]


def refuse(findings: Sequence[Finding]) -> None:
    """Fail if something is missing.

    Raises:
        NotInstalled: for the first missing thing, with the command that fixes it.
    """
    for finding in findings:
        if finding.status == "missing":
            raise NotInstalled(line(finding))


def refuse_fleet(config: dict[str, Any]) -> None:
    """Fail if something is missing for a complete run here, and print warnings.

    Raises:
        NotInstalled: see ``refuse``.
    """
    found = of_fleet(config)
    refuse(found)
    for finding in found:
        print(f"warning: {line(finding)}", file=sys.stderr)


def line(finding: Finding) -> str:
    """Format a finding in one line, with the command or setting that fixes it after the arrow."""
    return f"{finding.name}: {finding.found}{f' -> {finding.mend}' if finding.mend else ''}"
