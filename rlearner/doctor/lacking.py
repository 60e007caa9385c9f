"""What a configuration needs of this machine's software: the doctor shows it, and who is about to start asks it first."""

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

# What each role says of its own part; by name, as roles do not import each other.
ROLES: Final = ("rollout.preflight:look", "envhub.preflight:look", "rewardhub.preflight:look")
OTHERS: Final = ("rollout.", "domains.")  # settings whose packages other processes need than the learner

Look = Callable[[], list[Finding]]


def looks(config: dict[str, Any], wanted: Needs) -> list[Look]:
    """Packages, programs, and what each role says of its own part, each to be called in a thread.

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
    """Packages of engines, trainers and extras, those that are asked for among them."""
    plugins = {**wanted.plugins, **({"a data file": "parquet"} if wanted.parquet else {})}
    return packages.tool_findings(project, plugins, gpus=bool(existing()))


def gpus(wanted: Needs) -> list[Finding]:
    """GPUs, driver and CUDA, and how weights would travel between them."""
    return hardware.gpu_findings(*hardware.find_gpus(), hardware.find_torch(), wanted, len(existing()))


def of_fleet(config: dict[str, Any]) -> list[Finding]:
    """What a whole run on this machine would end for, or stumble over.

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
    """Overrides by which a whole run on this machine settles what its configuration leaves open: weights go through host memory where NCCL
    cannot carry them, for instance to a server on the learner's own GPU.

    Args:
        config: validated, of a run.
    """
    if config["train"].get("weights_backend") not in (None, "auto"):
        return []
    return [finding.mend for finding in gpus(needs(config)) if finding.name == "weights" and finding.status == "missing"]


def of_learner(config: dict[str, Any]) -> list[Finding]:
    """What the learner, or offline training, would end for.

    Args:
        config: validated.
    """
    wanted = needs(config)
    own = {key: name for key, name in wanted.plugins.items() if not key.startswith(OTHERS)}
    found = tools(packages.find_project(), Needs(plugins=own, parquet=wanted.parquet))
    return [finding for finding in found if finding.status == "missing"]


def refuse(findings: Sequence[Finding]) -> None:
    """Do not start without what is missing.

    Raises:
        NotInstalled: something is; the first, with the command that mends it.
    """
    for finding in findings:
        if finding.status == "missing":
            raise NotInstalled(line(finding))


def refuse_fleet(config: dict[str, Any]) -> None:
    """Before a whole run is started here: refuse what is missing, say what may go wrong.

    Raises:
        NotInstalled: see ``refuse``.
    """
    found = of_fleet(config)
    refuse(found)
    for finding in found:
        print(f"warning: {line(finding)}", file=sys.stderr)


def line(finding: Finding) -> str:
    """In one line; what stands behind the arrow, a command or a setting, mends it."""
    return f"{finding.name}: {finding.found}{f' -> {finding.mend}' if finding.mend else ''}"
