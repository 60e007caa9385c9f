"""Checks what a configuration needs on this machine, for the doctor and before a start."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from broker.errors import NotInstalled
from broker.settings.preflight import PreflightFinding
from broker.settings.registry import resolve
from broker.system.gpus import existing
from rlearner.doctor import broker_checks, hardware, packages, sandbox
from rlearner.doctor.family_trial import family_findings
from rlearner.doctor.references import reference_findings
from rlearner.doctor.requirements import MachineRequirements, requirements_of

# Each role's own checks, by name, as roles do not import each other.
ROLES: Final = tuple(
    f"{role}.preflight:preflight_findings" for role in ("rollout", "envhub", "rewardhub")
)
OTHERS: Final = ("rollout.", "domains.")  # settings whose packages the learner does not need

Look = Callable[[], list[PreflightFinding]]


def preflight_checks(config: dict[str, Any], wanted: MachineRequirements) -> list[Look]:
    """Return the checks of packages, programs and each role's own part of a validated
    configuration, for threads.
    """
    project = packages.find_project()
    checks: list[Look] = [
        lambda: [*packages.program_findings(wanted.programs), *tools(project, wanted)]
    ]
    checks.append(lambda: family_findings(config))
    if config.get("domains"):
        checks += [*(_role(name, config) for name in ROLES), lambda: reference_findings(config)]
    return checks


def _role(name: str, config: dict[str, Any]) -> Look:
    return lambda: list(resolve("looks", name, {})(config))


def tools(
    project: packages.ProjectRequirements, wanted: MachineRequirements
) -> list[PreflightFinding]:
    """Check the packages of engines, trainers and extras."""
    plugins = {**wanted.plugins, **({"a data file": "parquet"} if wanted.parquet else {})}
    return packages.tool_findings(project, plugins, gpus=bool(existing()))


def gpus(wanted: MachineRequirements) -> list[PreflightFinding]:
    """Check GPUs, driver and CUDA, and how weights would travel between GPUs."""
    return hardware.gpu_findings(
        *hardware.find_gpus(), hardware.find_torch(), wanted, len(existing())
    )


def fleet_findings(config: dict[str, Any]) -> list[PreflightFinding]:
    """Return what would stop or disturb a complete run on this machine; ``config`` is validated."""
    wanted = requirements_of(config)
    asked: list[Look] = [lambda: broker_checks.port_findings(wanted), lambda: gpus(wanted)]
    if wanted.sandbox:
        asked.append(lambda: sandbox.sandbox_findings(wanted))
    with ThreadPoolExecutor(max_workers=4) as pool:
        running = [pool.submit(look) for look in [*asked, *preflight_checks(config, wanted)]]
        return [
            finding
            for each in running
            for finding in each.result()
            if finding.status in ("missing", "warning")
        ]


def learner_findings(config: dict[str, Any]) -> list[PreflightFinding]:
    """Return what would stop the learner or offline training; ``config`` is validated."""
    wanted = requirements_of(config)
    own = {key: name for key, name in wanted.plugins.items() if not key.startswith(OTHERS)}
    found = tools(packages.find_project(), MachineRequirements(plugins=own, parquet=wanted.parquet))
    found += family_findings(config)
    return [finding for finding in found if finding.status == "missing"]


def require_installed(findings: Sequence[PreflightFinding]) -> None:
    """Fail if something is missing.

    Raises:
        NotInstalled: for the first missing thing, with the command that fixes it.
    """
    for finding in findings:
        if finding.status == "missing":
            raise NotInstalled(format_finding(finding))


def require_fleet(config: dict[str, Any]) -> None:
    """Fail if something is missing for a complete run here, and print warnings.

    Raises:
        NotInstalled: see ``require_installed``.
    """
    found = fleet_findings(config)
    require_installed(found)
    for finding in found:
        print(f"warning: {format_finding(finding)}", file=sys.stderr)


def format_finding(finding: PreflightFinding) -> str:
    """Format a finding in one line, with the command or setting that fixes it after the arrow."""
    return f"{finding.name}: {finding.found}{f' -> {finding.remedy}' if finding.remedy else ''}"
