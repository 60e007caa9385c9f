"""Decides which names tests take from the program, and which from Python. Starts no process.

Names that tests bind themselves, and Python's builtins, never come from the program, so it cannot
replace its judge.
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

BUILTIN: Final = frozenset(dir(builtins))
ALIASES: Final = {"np": "numpy", "pd": "pandas"}
# Tests that use one of these without an import mean the library's, unless it is all that they use.
LIBRARY: Final = {
    **dict.fromkeys(("Counter", "OrderedDict", "defaultdict", "deque", "namedtuple"),
    "collections"),
    "isclose": "math", "deepcopy": "copy", "Decimal": "decimal", "Fraction": "fractions",
    "date": "datetime",
    "timedelta": "datetime",
    **dict.fromkeys(("Any", "Callable", "Dict", "Iterable", "List", "Optional", "Sequence", "Set",
    "Tuple", "Union"),
        "typing"),
}  # fmt: skip
# What a program returns would run among the tests.
UNSAFE: Final = frozenset({"eval", "exec"})
MODULE: Final = "solution"
_NO_SUBJECT: Final = (type, bool, type(None), type(NotImplemented), type(...))


@dataclass(frozen=True)
class Names:
    """Names that tests use and do not bind.

    Attributes:
        library: module, and attribute of it (empty: the module itself), by name.
        imports: whether they import ``solution``.
        unsafe: those of ``UNSAFE`` that they use.
    """

    program: tuple[str, ...]
    library: dict[str, tuple[str, str]] = field(default_factory=dict)
    imports: bool = False
    unsafe: tuple[str, ...] = ()


@lru_cache(maxsize=8)
def names_of(texts: tuple[str, ...]) -> Names:
    """Return the names in these pieces of Python, executed in turn in one scope.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: if a piece is not valid Python.
    """
    trees = [ast.parse(text) for text in texts]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    used_names = [
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    ]
    dotted = {
        node.value.id
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    imported = {name.split(".")[0] for node in nodes for name in _imported_modules(node)}
    bound = {name for tree in trees for name in _bound_names(tree.body)}
    known_names = bound | BUILTIN
    free = [
        name
        for name in dict.fromkeys(used_names)
        if name not in known_names and not name.startswith("__")
    ]
    library = {
        name: (ALIASES.get(name, name), "") for name in free if name in dotted and _is_module(name)
    }
    unbound = [name for name in free if name not in library]
    if not all(name in LIBRARY for name in unbound):
        library |= {name: (LIBRARY[name], name) for name in unbound if name in LIBRARY}
    program = tuple(name for name in unbound if name not in library)
    # A problem may ask for a function that has the name of a builtin.
    if not program and MODULE not in imported:
        own = {name for name in used_names if name in BUILTIN and name not in bound}
        own = {name for name in own if not isinstance(getattr(builtins, name), _NO_SUBJECT)}
        program = tuple(own) if len(own) == 1 else ()
    unsafe = tuple(
        name for name in dict.fromkeys(used_names) if name in UNSAFE and name not in bound
    )
    return Names(program, library, MODULE in imported, unsafe)


def _is_module(name: str) -> bool:
    return name in ALIASES or name in sys.stdlib_module_names


def _imported_modules(node: ast.AST) -> Iterable[str]:
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return []


def _bound_names(body: Iterable[ast.AST]) -> Iterable[str]:
    """Yield what statements bind in their own scope, not inside functions and classes."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from ((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store):
                yield node.id
        elif isinstance(node, ast.ExceptHandler):
            if node.name:
                yield node.name
            yield from _bound_names(node.body)
        elif not isinstance(
            node, (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
        ):
            yield from _bound_names(ast.iter_child_nodes(node))
