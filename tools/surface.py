"""Counts what a reader meets line by line: names, assignments, calls, comments and long lines of
Python files.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tools.prose import EMPTY_NAMES, EMPTY_NAMES_ALLOWED

LONGEST_LINE: Final = 100
MOST_POSITIONAL: Final = 5
_NO_COMMENT: Final = re.compile(r"#\s*(noqa|type:|fmt:|pragma|ruff:|mypy:|[-=#*~]{3,}|!)")
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Surface:
    """Counts of some files, and where the places are that count against them ("path:line word")."""

    num_lines: int = 0
    num_comments: int = 0
    num_names: int = 0
    num_functions: int = 0
    num_conditionals: int = 0
    places: dict[str, list[str]] = field(default_factory=dict)

    def add_place(self, key: str, place: str) -> None:
        self.places.setdefault(key, []).append(place)

    def count(self, key: str) -> int:
        return len(self.places.get(key, []))

    def figures(self) -> dict[str, float]:
        """Return the figures that have limits."""
        thousands = max(self.num_lines, 1) / 1000
        return {
            "pronoun_names": round(self.count("pronoun_names") / max(self.num_names, 1), 4),
            "one_names": self.count("one_names"),
            "tuple_packs_per_1k": round(self.count("tuple_packs") / thousands, 2),
            "one_word_functions": round(
                self.count("one_word_functions") / max(self.num_functions, 1), 4
            ),
            "conditional_per_1k": round(self.num_conditionals / thousands, 2),
            "comment_lines": round(self.num_comments / max(self.num_lines, 1), 4),
            "lines_over_100": self.count("lines_over_100"),
            "positional_over_5": self.count("positional_over_5"),
            "tuple_splats": self.count("tuple_splats"),
        }


def measure(files: Iterable[Path]) -> Surface:
    """Return the counts of Python files."""
    surface = Surface()
    for path in files:
        text = path.read_text(encoding="utf-8")
        _measure_lines(surface, path, text)
        _measure_tree(surface, path, ast.parse(text))
    return surface


def assigned_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield each name that is assigned or a parameter, with its line, ``self`` and ``cls``
    excepted.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg) and node.arg not in ("self", "cls"):
            yield node.arg, node.lineno


def is_empty(name: str) -> bool:
    """Whether a name says nothing of its value."""
    bare = name.strip("_").lower()
    return bare in EMPTY_NAMES and bare not in EMPTY_NAMES_ALLOWED


def _measure_lines(surface: Surface, path: Path, text: str) -> None:
    lines = text.splitlines()
    surface.num_lines += len(lines)
    for number, line in enumerate(lines, 1):
        if len(line) > LONGEST_LINE:
            surface.add_place("lines_over_100", f"{path}:{number}")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_comment = token.type == tokenize.COMMENT and not _NO_COMMENT.match(token.string)
        surface.num_comments += is_comment and not token.line[: token.start[1]].strip()


def _measure_tree(surface: Surface, path: Path, tree: ast.Module) -> None:
    for name, line in assigned_names(tree):
        surface.num_names += 1
        if is_empty(name):
            surface.add_place("pronoun_names", f"{path}:{line} {name}")
        if name in ("one", "ones"):
            surface.add_place("one_names", f"{path}:{line}")
    for statement in tree.body:
        if isinstance(statement, _Function):
            surface.num_functions += 1
            if "_" not in statement.name.strip("_"):
                surface.add_place(
                    "one_word_functions", f"{path}:{statement.lineno} {statement.name}"
                )
    for node in ast.walk(tree):
        surface.num_conditionals += isinstance(node, ast.IfExp)
        if isinstance(node, ast.Assign) and _packs(node):
            surface.add_place("tuple_packs", f"{path}:{node.lineno}")
        if isinstance(node, ast.Call) and len(node.args) > MOST_POSITIONAL:
            surface.add_place("positional_over_5", f"{path}:{node.lineno}")
        if isinstance(node, _Function):
            for place in _splats(node):
                surface.add_place("tuple_splats", f"{path}:{place}")


def _packs(node: ast.Assign) -> bool:
    """Whether one line assigns several values to several names; a swap is no pack."""
    if not (isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)):
        return False
    names = Counter(ast.unparse(target) for target in node.targets[0].elts)
    return names != Counter(ast.unparse(value) for value in node.value.elts)


def _splats(function: _Function) -> Iterator[int]:
    """Yield the lines of calls that splat a tuple built in the same function."""
    tuples = {
        target.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            for argument in node.args:
                if isinstance(argument, ast.Starred) and (
                    isinstance(argument.value, ast.Tuple)
                    or (isinstance(argument.value, ast.Name) and argument.value.id in tuples)
                ):
                    yield node.lineno
