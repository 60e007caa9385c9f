"""Docstrings name exceptions that exist."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[3]
PACKAGES: Final = [folder.parent for folder in sorted(ROOT.glob("*/__init__.py"))]
RAISES: Final = re.compile(r"^Raises:\n((?: {4}.*\n?)+)", re.MULTILINE)
EXCEPTION: Final = re.compile(r"^ {4}([\w.]+(?:(?:, | or )[\w.]+)*):", re.MULTILINE)

Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for package in PACKAGES:
        if package.name not in {"tests", "tools"}:
            for path in sorted(package.rglob("*.py")):
                yield path, ast.parse(path.read_text(encoding="utf-8"))


def defined_names(tree: ast.Module) -> Iterator[str]:
    """Yield the classes and values that a module defines, and what it imports."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from (alias.asname or alias.name.partition(".")[0] for alias in names)


def raised_names(tree: ast.Module) -> Iterator[str]:
    """Yield the exceptions of a module's sections ``Raises``, as they are written there."""
    for node in ast.walk(tree):
        if isinstance(node, Documented):
            for section in RAISES.findall(ast.get_docstring(node) or ""):
                for names in EXCEPTION.findall(section):
                    yield from re.split(", | or ", names)


def test_raised_exceptions_exist() -> None:
    modules = dict(trees())
    known = {name for tree in modules.values() for name in defined_names(tree)} | set(dir(builtins))
    unknown = {
        f"{path.relative_to(ROOT)}: {name}"
        for path, tree in modules.items()
        for name in raised_names(tree)
        if name.partition(".")[0] not in known
    }
    assert unknown == set()
