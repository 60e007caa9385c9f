"""Runs all checks of the doctor in parallel, and sorts their findings."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import metadata
from pathlib import Path
from typing import Any, Final

from broker.errors import ConfigError, NotInstalled, UserError
from broker.settings.preflight import PreflightFinding
from broker.settings.runspec import load, validate
from rlearner.doctor import machine, packages, preflight, sandbox
from rlearner.doctor.broker_checks import (
    address_findings,
    port_findings,
    server_findings,
    store_finding,
)
from rlearner.doctor.requirements import MachineRequirements, requirements_of

LACKING: Final = "not installed"  # in the error of a plug-in whose package is missing
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


def examine(path: str | None, overrides: Sequence[str] = ()) -> list[PreflightFinding]:
    """Return all findings about this machine, judged by a configuration if one is given.

    Raises:
        UserError: if the file cannot be read, or holds something that is not allowed.
    """
    config = load(path, overrides) if path is not None else None
    if path is None and overrides:
        raise UserError(f"{overrides[0]!r}: an override needs a CONFIG to change")
    resolved = with_defaults(config) if config is not None else None
    wanted = requirements_of(resolved) if resolved is not None else MachineRequirements()
    with ThreadPoolExecutor(max_workers=4) as pool:  # they mostly wait for small programs
        running = [pool.submit(work) for work in _looks(resolved or {}, wanted)]
        checked = (
            [configuration(path, resolved)] if path is not None and resolved is not None else []
        )
        findings = [*checked, *(finding for each in running for finding in each.result())]
    return sorted(findings, key=lambda finding: AREAS.index(finding.area))


def with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with its defaults, checked by section; ``configuration`` checks
    across sections.

    Raises:
        ConfigError: for the first bad key.
    """
    if _offline(config):
        from learner.offline import config as offline

        return validate(config, offline.SECTIONS[offline.pipeline_of(config)], ())
    return validate(config, checks=())


def configuration(path: str, config: dict[str, Any]) -> PreflightFinding:
    """Run the processes' own checks on a configuration. A package that they lack is a finding,
    anything else an error.

    Raises:
        UserError: if the configuration is wrong.
    """
    try:
        if _offline(config):
            from learner.offline import config as offline

            offline.validate(offline.pipeline_of(config), config)
        else:
            validate(config)
    except (ConfigError, NotInstalled) as error:
        if isinstance(error, ConfigError) and LACKING not in str(error):
            raise
        remedy = "see the package below, or choose another"
        return PreflightFinding("configuration", path, "missing", str(error), remedy)
    return PreflightFinding("configuration", path, "ok", "valid")


def _offline(config: Mapping[str, Any]) -> bool:
    return not config.get("domains") and "data" in config


def _looks(config: dict[str, Any], wanted: MachineRequirements) -> list[preflight.Look]:
    project = packages.find_project()
    return [
        *preflight.preflight_checks(config, wanted),
        lambda: sandbox.sandbox_findings(wanted),
        lambda: preflight.gpus(wanted),
        lambda: [*server_findings(), *address_findings(wanted), *port_findings(wanted)],
        lambda: [*python(), *packages.base_findings(project)],
        lambda: _machine(wanted),
    ]


def _machine(wanted: MachineRequirements) -> list[PreflightFinding]:
    resources = machine.measure_machine(wanted.run_dir)
    judged = machine.machine_findings(resources, wanted, machine.model_bytes(wanted.model_path))
    unwritable = store_finding(Path(wanted.run_dir).absolute())
    return judged if unwritable is None else [*judged, unwritable]


def python(version: tuple[int, ...] = sys.version_info[:3]) -> list[PreflightFinding]:
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
