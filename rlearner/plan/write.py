"""Writes a plan: a YAML file that inherits the user's configuration, and a shell file for each host."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import yaml

from broker.errors import UserError
from broker.settings.runspec import load, validate
from rlearner.plan.changes import changed_keys, launch_lines, nested
from rlearner.plan.demands import Demands
from rlearner.plan.facts import Machine
from rlearner.plan.plans import Plan

CONFIG: Final = "plan.yaml"


def write_plan(
    folder: str, plan: Plan, demands: Demands, machine: Machine, *, source: Path, overrides: dict[str, Any], run: str
) -> list[Path]:
    """Write ``plan.yaml`` and ``host-N.sh``; return the files.

    Args:
        source: the user's configuration.
        overrides: keys of the command line that change it, as sections.

    Raises:
        UserError: if a file cannot be written.
    """
    out = Path(folder)
    title = f"# By rlearner plan: {plan.learner.words}; {plan.servers} servers.\n"
    settings = merged(overrides, nested(changed_keys(plan, demands)))
    text = title + yaml.safe_dump({"inherit": str(source.resolve())} | settings, sort_keys=False)
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / CONFIG).write_text(text, encoding="utf-8")
        files = [out / CONFIG]
        for host in range(machine.hosts):
            files.append(out / f"host-{host}.sh")
            lines = launch_lines(plan, machine, host, run, demands.environments)
            files[-1].write_text(_script(lines, host, machine), encoding="utf-8")
            files[-1].chmod(0o755)
    except OSError as error:
        raise UserError(f"--write {folder}: {error.strerror}") from None
    validate(load(str(out / CONFIG)), checks=())
    return files


def _script(lines: list[str], host: int, machine: Machine) -> str:
    head = ["#!/bin/sh", f"# Host {host} of {machine.hosts}. By rlearner plan."]
    if machine.hosts > 1:
        tokens = "the *.token files that host 0 writes" if host else "other hosts need the *.token files from here"
        head.append(f': "${{HOST0:?set HOST0 to the address of host 0}}"  # {tokens}')
    head += [
        f'CONFIG="$(dirname "$0")/{CONFIG}"',
        "pids=",
        "trap 'kill $pids 2>/dev/null' EXIT",
        "trap 'exit 130' INT TERM",
    ]
    body = [f'{line} pids="$pids $!"' if line.endswith("&") else line for line in lines]
    return "\n".join([*head, *body, *(["wait"] if lines and lines[-1].endswith("&") else [])]) + "\n"


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return two mappings of sections as one; the other wins."""
    found = dict(one)
    for key, value in other.items():
        old = found.get(key)
        found[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return found


def difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return what ``after`` has that ``before`` has not, by section; null for what it lacks."""
    found: dict[str, Any] = {key: None for key in before if key not in after}
    for key, value in after.items():
        old = before.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            if inner := difference(old, value):
                found[key] = inner
        elif key not in before or old != value:
            found[key] = value
    return found
