"""Checks what a configuration needs on this machine, for the doctor and before a start."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from broker.errors import NotInstalled
from broker.settings.preflight import PreflightFinding
from broker.settings.registry import resolve
from broker.settings.run_settings import RunSettings
from broker.system.gpus import existing
from rlearner.doctor import broker_checks, hardware, packages, sandbox
from rlearner.doctor.family_trial import family_findings
from rlearner.doctor.references import reference_findings
from rlearner.doctor.requirements import MachineRequirements, Settings, requirements_of

# Each role's own checks, by name, as roles do not import each other.
ROLES: Final = tuple(
    f"{role}.preflight:preflight_findings" for role in ("rollout", "envhub", "rewardhub")
)
# Settings whose packages the learner does not need.
NOT_THE_LEARNERS: Final = ("rollout.", "domains.")

Look = Callable[[], list[PreflightFinding]]


def preflight_checks(settings: Settings | None, needs: MachineRequirements) -> list[Look]:
    """Return checks, for threads, of packages, programs and each role's part of valid settings."""
    project = packages.find_project()
    checks: list[Look] = [
        lambda: [*packages.program_findings(needs.programs), *check_tools(project, needs)]
    ]
    if settings is not None:
        checks.append(partial(family_findings, settings))
    if isinstance(settings, RunSettings) and settings.domains:
        checks += [_role_check(name, settings) for name in ROLES]
        checks.append(partial(reference_findings, settings))
    return checks


def _role_check(name: str, settings: RunSettings) -> Look:
    return lambda: list(resolve("looks", name, {})(settings))


def check_tools(
    project: packages.ProjectRequirements, needs: MachineRequirements
) -> list[PreflightFinding]:
    """Check the packages of engines, trainers and extras."""
    plugins = dict(needs.plugins)
    plugins |= {f"a data set ({extra})": extra for extra in sorted(needs.data_extras)}
    return packages.tool_findings(project, plugins, gpus=bool(existing()))


def check_gpus(needs: MachineRequirements) -> list[PreflightFinding]:
    """Check GPUs, driver and CUDA, and how weights would travel between GPUs."""
    devices, problem = hardware.find_gpus()
    return hardware.gpu_findings(
        devices, problem, hardware.find_torch(), needs=needs, num_devices=len(existing())
    )


def fleet_findings(settings: RunSettings) -> list[PreflightFinding]:
    """Return what would stop or disturb a complete run of checked settings on this machine."""
    needs = requirements_of(settings)
    checks: list[Look] = [lambda: broker_checks.port_findings(needs), lambda: check_gpus(needs)]
    if needs.sandbox:
        checks.append(lambda: sandbox.sandbox_findings(needs))
    with ThreadPoolExecutor(max_workers=4) as pool:
        futures = [pool.submit(check) for check in [*checks, *preflight_checks(settings, needs)]]
        return [
            finding
            for future in futures
            for finding in future.result()
            if finding.status in ("missing", "warning")
        ]


def learner_findings(settings: Settings) -> list[PreflightFinding]:
    """Return what would stop the learner or offline training with checked settings."""
    needs = requirements_of(settings)
    # Servers and hubs may run on other machines, with their packages.
    own = {key: name for key, name in needs.plugins.items() if not key.startswith(NOT_THE_LEARNERS)}
    findings = check_tools(
        packages.find_project(), MachineRequirements(plugins=own, data_extras=needs.data_extras)
    )
    findings += family_findings(settings)
    return [finding for finding in findings if finding.status == "missing"]


def require_installed(findings: Sequence[PreflightFinding]) -> None:
    """Fail if something is missing.

    Raises:
        NotInstalled: for the first missing thing, with the command that fixes it.
    """
    for finding in findings:
        if finding.status == "missing":
            raise NotInstalled(format_finding(finding))


def require_fleet(settings: RunSettings) -> None:
    """Fail if something is missing for a complete run here, and print warnings.

    Raises:
        NotInstalled: see ``require_installed``.
    """
    findings = fleet_findings(settings)
    require_installed(findings)
    for finding in findings:
        print(f"warning: {format_finding(finding)}", file=sys.stderr)


def format_finding(finding: PreflightFinding) -> str:
    """Format a finding in one line, with the command or setting that fixes it after the arrow."""
    text = f"{finding.name}: {finding.found}"
    if finding.remedy:
        text += f" -> {finding.remedy}"
    return text
