"""Finds names of metrics in the code that no declaration covers.

A name is a string ``group/name`` that is the key of a dictionary, or that begins with the group of
a declared metric. A part in braces of an f-string may be anything.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from broker.telemetry.run_metrics import RUN_METRICS

# A text that ends in ``_`` or ``/`` is the beginning of names.
_NAME: Final = re.compile(r"[a-z_*]+(/[a-z0-9_@*<>]+)*/[a-z0-9_@*<>]*[a-z0-9@*>]")
_PLACEHOLDER: Final = "*"
_GROUPS: Final = frozenset(
    metric.name.split("/")[0] for metric in RUN_METRICS if "/" in metric.name
)
_DECLARED: Final = "\n".join(metric.name for metric in RUN_METRICS)
# Strings of the same form: texts of trackers, a part of a reward in the examples of the wire
# contract, a label on the terminal, folders of the packages.
_OTHER_STRINGS: Final = frozenset(
    {"samples/*", "evaluated/*", "judge/asked", "tok/s", "envhub/envs", "rewardhub/rewards"}
)
# Folders of a task and of a sandbox, which are keys, too.
_FOLDERS: Final = ("etc/", "var/", "notes/", "environment/files/")


def undeclared_names(root: Path, trees: Mapping[Path, ast.Module]) -> list[str]:
    """Return ``file:line name`` of each name without a declaration."""
    return [
        f"{file.relative_to(root)}:{line} {name}"
        for file, tree in trees.items()
        for name, line in sorted(metric_names(tree))
        if not is_declared(name)
    ]


def metric_names(tree: ast.Module) -> set[tuple[str, int]]:
    """Return the names of metrics in a module with their lines; ``*`` stands for a value."""
    keys = {id(key) for node in ast.walk(tree) for key in _keys(node)}
    formatted = (node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr))
    parts = {id(part) for node in formatted for part in node.values}
    return {
        (text, node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant | ast.JoinedStr)
        and id(node) not in parts
        and _NAME.fullmatch(text := _text(node))
        and text not in _OTHER_STRINGS
        and not text.startswith(_FOLDERS)
        and (id(node) in keys or text.split("/")[0] in _GROUPS)
    }


def is_declared(name: str) -> bool:
    """Return whether a declaration covers a name, whose ``*`` may be anything."""
    part = re.escape(name).replace(re.escape(_PLACEHOLDER), ".+")
    if re.search(rf"^{part}$", _DECLARED, re.MULTILINE):
        return True
    return any(
        re.fullmatch(re.sub(r"<\w+>|\\\*", ".+", re.escape(metric.name)), name)
        for metric in RUN_METRICS
        if "<" in metric.name or "*" in metric.name
    )


def _keys(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Dict):
        yield from (key for key in node.keys if key is not None)
    elif isinstance(node, ast.DictComp):
        yield node.key
    elif isinstance(node, ast.Subscript):
        yield node.slice
    elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "fromkeys":
        yield from ast.walk(node.args[0])


def _text(node: ast.Constant | ast.JoinedStr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(
            _text(part) if isinstance(part, ast.Constant) else _PLACEHOLDER for part in node.values
        )
    return node.value if isinstance(node.value, str) else ""
