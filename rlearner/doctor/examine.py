"""Runs all checks of the doctor in parallel, and sorts their findings."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import metadata
from pathlib import Path
from typing import Final

from broker.errors import ConfigError, NotInstalled, UserError
from broker.settings.config import UserSettings
from broker.settings.preflight import PreflightFinding
from broker.settings.runspec import check_settings, load
from rlearner.doctor import machine, packages, preflight, sandbox
from rlearner.doctor.broker_checks import (
    address_findings,
    port_findings,
    server_findings,
    store_finding,
)
from rlearner.doctor.requirements import MachineRequirements, Settings, requirements_of

# Part of the error of a plug-in whose package is missing.
LACKING: Final = "not installed"
PACKAGES: Final = ("python", "engines", "trainers", "optional", "agents")
AREAS: Final = (
    "configuration",
    *PACKAGES,
    "models",
    "endpoints",
    "gpu",
    "broker",
    "sandbox",
    "machine",
)
OLDEST_PYTHON: Final = (3, 11)


def examine_machine(path: str | None, overrides: Sequence[str] = ()) -> list[PreflightFinding]:
    """Return all findings about this machine, judged by a configuration if one is given.

    Raises:
        UserError: if the file cannot be read, or holds something that is not allowed.
    """
    if path is None and overrides:
        raise UserError(f"{overrides[0]!r}: an override needs a CONFIG to change")
    config: UserSettings = {}
    settings: Settings | None = None
    needs = MachineRequirements()
    if path is not None:
        config = load(path, overrides)
        settings = with_defaults(config)
        needs = requirements_of(settings)
    findings: list[PreflightFinding] = []
    # The checks mostly wait for small programs, so threads are enough.
    with ThreadPoolExecutor(max_workers=4) as pool:
        futures = [pool.submit(check) for check in _machine_checks(settings, needs)]
        if path is not None:
            findings.append(check_configuration(path, config))
        for future in futures:
            findings += future.result()
    return sorted(findings, key=lambda finding: AREAS.index(finding.area))


def with_defaults(config: UserSettings) -> Settings:
    """Return the settings of a configuration with their defaults, checked section by section.

    Raises:
        ConfigError: for the first bad key.
    """
    if _is_offline(config):
        from learner.offline import config as offline

        return offline.parse_config(offline.pipeline_of(config), config)
    return check_settings(config, checks=())


def check_configuration(path: str, config: UserSettings) -> PreflightFinding:
    """Run the processes' own checks on a configuration; a missing package is a finding.

    Raises:
        UserError: if the configuration is wrong.
    """
    try:
        if _is_offline(config):
            from learner.offline import config as offline

            offline.validate_config(offline.pipeline_of(config), config)
        else:
            check_settings(config)
    except (ConfigError, NotInstalled) as error:
        if isinstance(error, ConfigError) and LACKING not in str(error):
            raise
        remedy = "see the package below, or choose another"
        return PreflightFinding("configuration", path, "missing", str(error), remedy)
    return PreflightFinding("configuration", path, "ok", "valid")


def _is_offline(config: UserSettings) -> bool:
    return not config.get("domains") and "data" in config


def _machine_checks(settings: Settings | None, needs: MachineRequirements) -> list[preflight.Look]:
    project = packages.find_project()
    return [
        *preflight.preflight_checks(settings, needs),
        lambda: sandbox.sandbox_findings(needs),
        lambda: preflight.check_gpus(needs),
        lambda: [*server_findings(), *address_findings(needs), *port_findings(needs)],
        lambda: [*check_python(), *packages.base_findings(project)],
        lambda: _check_machine(needs),
    ]


def _check_machine(needs: MachineRequirements) -> list[PreflightFinding]:
    resources = machine.measure_machine(needs.run_dir)
    findings = machine.machine_findings(resources, needs, machine.model_bytes(needs.model_path))
    if (unwritable := store_finding(Path(needs.run_dir).absolute())) is not None:
        findings.append(unwritable)
    return findings


def check_python(version: tuple[int, ...] = sys.version_info[:3]) -> list[PreflightFinding]:
    """Check the interpreter and the project itself."""
    text = f"{'.'.join(map(str, version))} at {sys.executable}"
    if version < OLDEST_PYTHON:
        return [
            PreflightFinding("python", "Python", "missing", text, "make setup PYTHON=python3.11")
        ]
    interpreter = PreflightFinding("python", "Python", "ok", text)
    try:
        own = metadata(packages.PROJECT)["Version"]
    except ModuleNotFoundError:
        return [interpreter]
    return [interpreter, PreflightFinding("python", packages.PROJECT, "ok", own)]
