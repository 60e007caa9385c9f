"""Shell completion of commands, options, settings and runs, with argcomplete.

``eval "$(rlearner completion)"`` in a shell's start-up file enables it: the shell then runs a
command with ``_ARGCOMPLETE`` set to get completions. Otherwise this module is not imported.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Final, get_args

from broker.settings.config import Section
from broker.settings.config_file import shipped_names
from broker.settings.run_settings import NAMED_SECTIONS
from broker.settings.runspec import SECTIONS

COMMANDS: Final = ("rlearner", "rollout-server", "envhub", "rewardhub", "broker")
RUNS: Final = "runs"


def offer(parser: argparse.ArgumentParser, commands: Iterator[argparse.ArgumentParser]) -> None:
    """Print the completions for the shell and exit."""
    import argcomplete

    sources: dict[str, Callable[..., list[str]]] = {
        "overrides": settings,
        "config": configs,
        "run_name": runs,
        "other": runs,
    }
    for command in commands:
        for action in command._actions:
            if action.dest in sources:
                action.completer = sources[action.dest]  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser)


def settings(prefix: str, **_: object) -> list[str]:
    """Return the settings with a prefix, such as ``train.lr=``; names in ``NAMED_SECTIONS`` are
    free.
    """
    head = prefix.partition(".")[0]
    keys: list[str] = []
    for name, target in SECTIONS.items():
        if name != head:
            keys.append(f"{name}.")
        elif name not in NAMED_SECTIONS:
            module, attribute = target.split(":")
            keys += _setting_keys(f"{name}.", getattr(import_module(module), attribute))
    return [key for key in keys if key.startswith(prefix)]


def _setting_keys(prefix: str, section: type[Section]) -> Iterator[str]:
    for name, field in section.model_fields.items():
        inner = next(
            (kind for kind in (field.annotation, *get_args(field.annotation)) if _is_section(kind)),
            None,
        )
        if inner is None:
            yield f"{prefix}{name}="
        else:
            yield from _setting_keys(f"{prefix}{name}.", inner)


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def configs(prefix: str, **_: object) -> list[str]:
    """Return the package's configurations and local YAML files and folders with a prefix."""
    from argcomplete.completers import FilesCompleter

    shipped = sorted(name for name in shipped_names() if name.startswith(prefix))
    return [*shipped, *FilesCompleter(("yaml", "yml"))(prefix)]


def runs(prefix: str, parsed_args: argparse.Namespace | None = None, **_: object) -> list[str]:
    """Return the names of the runs in ``--dir``, or ``runs``."""
    folder = Path(getattr(parsed_args, "dir", None) or RUNS)
    return sorted(
        path.parent.name
        for path in folder.glob("*/config.yaml")
        if path.parent.name.startswith(prefix)
    )


def shell_code(shell: str) -> str:
    """Return the code that enables completion in a shell.

    Args:
        shell: ``bash``, ``zsh``, ``fish``, ``tcsh`` or ``powershell``.
    """
    import argcomplete

    return str(argcomplete.shellcode(list(COMMANDS), shell=shell))
