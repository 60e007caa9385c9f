"""Writes a plan: YAML that inherits the user's configuration, and a shell file for each host."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import yaml

from broker.errors import UserError
from broker.settings.config import UserSettings
from broker.settings.runspec import check_settings, load
from rlearner.plan.candidates import Plan
from rlearner.plan.changes import changed_keys, nest_keys
from rlearner.plan.demands import Demands
from rlearner.plan.facts import Machine
from rlearner.plan.scripts import CONFIG, host_script

REMEDY: Final = "name a new folder, or one that you can write to"


def check_folder(folder: str) -> None:
    """Check that a plan can be written there, before anything takes time.

    Raises:
        UserError: if it is a file, or cannot be written.
    """
    path = Path(folder).absolute()
    nearest = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    if not folder:
        raise UserError(f"--write {folder!r}: expected a folder; {REMEDY}")
    if not nearest.is_dir():
        raise UserError(f"--write {folder}: expected a folder, found a file at {nearest}; {REMEDY}")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(
            f"--write {folder}: expected a folder that you can write to, found {nearest}; {REMEDY}"
        )


def write_plan(
    folder: str,
    plan: Plan,
    demands: Demands,
    machine: Machine,
    *,
    source: Path,
    overrides: UserSettings,
    run: str,
) -> list[Path]:
    """Write ``plan.yaml`` and ``host-N.sh``; return the files. No existing file is changed.

    Args:
        source: the user's configuration.
        overrides: keys of the command line that change it, as sections.

    Raises:
        UserError: if a file cannot be written, or the folder holds another plan.
    """
    out = Path(folder)
    number = f"{plan.servers} server{'s' * (plan.servers != 1)}"
    settings = merge_sections(overrides, nest_keys(changed_keys(plan, demands)))
    text = yaml.safe_dump({"inherit": str(source.resolve())} | settings, sort_keys=False)
    contents = {out / CONFIG: f"# By rlearner plan: {plan.learner.words}; {number}.\n{text}"}
    for host in range(machine.hosts):
        contents[out / f"host-{host}.sh"] = host_script(
            plan, machine, host, run=run, environments=demands.environments
        )
    try:
        # All files are compared before the first is written, so that no two plans mix.
        for file in sorted({*contents, *out.glob("host-[0-9]*.sh")}, reverse=True):
            if file.exists() and (
                file not in contents or file.read_text(encoding="utf-8") != contents[file]
            ):
                raise UserError(
                    f"--write {folder}: {file} is of another plan; "
                    "name another folder, or remove that plan"
                )
        out.mkdir(parents=True, exist_ok=True)
        for file, content in contents.items():
            file.write_text(content, encoding="utf-8")
            file.chmod(0o755 if file.suffix == ".sh" else 0o644)
    except (OSError, UnicodeDecodeError) as error:
        problem: str | None = "it holds a file that is not text"
        if isinstance(error, OSError):
            problem = error.strerror
        raise UserError(f"--write {folder}: {problem}; {REMEDY}") from None
    # The written file must be one that the processes accept.
    check_settings(load(str(out / CONFIG)), checks=())
    return list(contents)


def merge_sections(base: UserSettings, overrides: UserSettings) -> UserSettings:
    """Return two mappings of sections as one; the overrides win."""
    sections = dict(base)
    for key, value in overrides.items():
        base_value = sections.get(key)
        if isinstance(base_value, dict) and isinstance(value, dict):
            value = merge_sections(base_value, value)
        sections[key] = value
    return sections


def diff_sections(old: UserSettings, new: UserSettings) -> UserSettings:
    """Return what ``new`` has that ``old`` has not, by section; null for what it lacks."""
    changes: UserSettings = {key: None for key in old if key not in new}
    for key, value in new.items():
        old_value = old.get(key)
        if isinstance(old_value, dict) and isinstance(value, dict):
            if inner := diff_sections(old_value, value):
                changes[key] = inner
        elif key not in old or old_value != value:
            changes[key] = value
    return changes
