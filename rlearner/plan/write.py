"""Writes a plan: a YAML file that inherits the user's configuration, and a shell file for each
host.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import yaml

from broker.errors import UserError
from broker.settings.runspec import load, validate
from rlearner.plan.candidates import Plan
from rlearner.plan.changes import changed_keys, nested
from rlearner.plan.demands import Demands
from rlearner.plan.facts import Machine
from rlearner.plan.scripts import CONFIG, script

WANTED: Final = "name a new folder, or one that you can write to"


def check_folder(folder: str) -> None:
    """Check that a plan can be written there, before anything takes time.

    Raises:
        UserError: if it is a file, or cannot be written.
    """
    path = Path(folder).absolute()
    there = next(one for one in (path, *path.parents) if os.path.lexists(one))
    if not folder:
        raise UserError(f"--write {folder!r}: expected a folder; {WANTED}")
    if not there.is_dir():
        raise UserError(f"--write {folder}: expected a folder, found a file at {there}; {WANTED}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(
            f"--write {folder}: expected a folder that you can write to, found {there}; {WANTED}"
        )


def write_plan(
    folder: str,
    plan: Plan,
    demands: Demands,
    machine: Machine,
    *,
    source: Path,
    overrides: dict[str, Any],
    run: str,
) -> list[Path]:
    """Write ``plan.yaml`` and ``host-N.sh``; return the files. Files that are there already are
    never changed.

    Args:
        source: the user's configuration.
        overrides: keys of the command line that change it, as sections.

    Raises:
        UserError: if a file cannot be written, or the folder holds another plan.
    """
    out = Path(folder)
    number = f"{plan.servers} server{'' if plan.servers == 1 else 's'}"
    settings = merged(overrides, nested(changed_keys(plan, demands)))
    text = yaml.safe_dump({"inherit": str(source.resolve())} | settings, sort_keys=False)
    contents = {out / CONFIG: f"# By rlearner plan: {plan.learner.words}; {number}.\n{text}"}
    for host in range(machine.hosts):
        contents[out / f"host-{host}.sh"] = script(plan, machine, host, run, demands.environments)
    try:
        for file in sorted({*contents, *out.glob("host-[0-9]*.sh")}, reverse=True):
            if file.exists() and (
                file not in contents or file.read_text(encoding="utf-8") != contents[file]
            ):
                raise UserError(
                    f"--write {folder}: {file} is of another plan; name another folder, or remove that plan"
                )
        out.mkdir(parents=True, exist_ok=True)
        for file, content in contents.items():
            file.write_text(content, encoding="utf-8")
            file.chmod(0o755 if file.suffix == ".sh" else 0o644)
    except (OSError, UnicodeDecodeError) as error:
        problem = (
            error.strerror if isinstance(error, OSError) else "it holds a file that is not text"
        )
        raise UserError(f"--write {folder}: {problem}; {WANTED}") from None
    validate(load(str(out / CONFIG)), checks=())
    return list(contents)


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return two mappings of sections as one; the other wins."""
    found = dict(one)
    for key, value in other.items():
        old = found.get(key)
        found[key] = (
            merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
        )
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
