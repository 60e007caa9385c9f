"""Finds the packages that a Python program imports at its start, and which of them are missing."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from rlearner_workers.environment import worker_environment

WITHIN_S: Final = 20.0
PROBE: Final = """import importlib.util, sys
sys.path[0] = sys.argv[1]
print(*[name for name in sys.argv[2:] if importlib.util.find_spec(name) is None])
"""


def imported(source: str) -> list[str]:
    """Return the top-level packages that a file imports when it starts, each once.

    Imports within ``try`` do not count: the program can do without them.

    Raises:
        SyntaxError: if the source is not Python.
    """
    names = (
        name.partition(".")[0]
        for node in _start_statements(ast.parse(source).body)
        for name in _module_names(node)
    )
    return list(dict.fromkeys(names))


def _start_statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.With):
            yield from _start_statements(node.body)


def _module_names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module]
    return []


def missing(
    interpreter: str, names: Sequence[str], folder: str, env: Mapping[str, str], cwd: str | None
) -> list[str]:
    """Return the names that an interpreter does not find; none if it does not run.

    Args:
        folder: of the program, where imports look first.
        env: added to its environment.
    """
    if not names:
        return []
    command = [interpreter, "-c", PROBE, folder, *names]
    env = {**worker_environment(), **env}
    try:
        probe = subprocess.run(
            command, capture_output=True, text=True, timeout=WITHIN_S, check=False, env=env, cwd=cwd
        )
    except (OSError, subprocess.TimeoutExpired):
        # the start of the program will report why
        return []
    if probe.returncode:
        return []
    return probe.stdout.split()
