"""Counts what a reader meets file by file: classes, folders, imports, long functions, old words."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from broker.settings.reference import describe_settings
from tools.metric_usage import undeclared_names
from tools.prose import ARCHAIC

LONG_FUNCTION: Final = 45  # statements
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_SETTINGS_NAME: Final = re.compile(r"_?(config|settings|section|overrides|env_args|train|spec)$")
_SETTINGS_AS_DICT: Final = re.compile(r"^(dict|Mapping|MutableMapping)\[str, (Any|object)\]")
_RAW_LOOKUP: Final = re.compile(r"\.config(\.get\(|\[)")


def measure_structure(
    root: Path, packages: Sequence[str], first_statements: int
) -> dict[str, list[str] | float]:
    """Return the figures of a tree; a list holds the places that count.

    Args:
        first_statements: of the tree that ``statements_share`` is a share of.
    """
    files = sorted(file for name in packages for file in (root / name).rglob("*.py"))
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    trees = {file: ast.parse(text) for file, text in texts.items()}
    classes = [
        (node.name, f"{file.relative_to(root)}:{node.lineno} {node.name}")
        for file, tree in trees.items()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    ]
    counts = Counter(name for name, _ in classes)
    one_word = [place for name, place in classes if len(split_camel(name)) == 1]
    folders = Counter(file.parent for file in files if file.name != "__init__.py")
    statements = sum(map(count_statements, trees.values()))
    documents = [*files, *sorted((root / "docs").rglob("*.md")), root / "README.md"]
    return {
        "one_word_classes": round(len(one_word) / max(len(classes), 1), 4),
        "repeated_class_names": sorted(name for name, count in counts.items() if count > 1),
        "max_modules_per_folder": max(folders.values()),
        "functions_over_45_statements": list(_long_functions(trees)),
        "import_cycles": find_cycles(_imports(root, trees)),
        "upward_arrows": _ignored_imports(root),
        "settings_as_dict": list(_untyped_settings(texts, trees)),
        "files_spelling_nccl": [
            str(file.relative_to(root))
            for file, text in texts.items()
            if "nccl" in text.lower().replace("asyncclient", "") and "backends" not in file.parts
        ],
        "undocumented_settings": [
            setting.key for setting in describe_settings() if not setting.meaning
        ],
        "undeclared_metrics": undeclared_names(root, trees),
        "stray_unit_tests": list(_stray_tests(root, packages)),
        "archaic": list(_archaic_words(documents)),
        "statements_share": round(statements / first_statements, 4),
        "bench_lines": sum(
            len(file.read_text(encoding="utf-8").splitlines())
            for file in (root / "bench").rglob("*.py")
        ),
    }


def split_camel(name: str) -> list[str]:
    """Return the words of a class name: ``HTTPServer`` has two."""
    return re.findall(r"[A-Z][a-z0-9]+|[A-Z]+(?![a-z])|[a-z0-9]+", name.strip("_"))


def count_statements(tree: ast.AST) -> int:
    """Return the number of statements; an assignment of several values counts once for each."""
    total = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            total += 1
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            target = node.targets[0]
            total += len(target.elts) - 1 if isinstance(target, ast.Tuple) else 0
    return total


def find_cycles(imports: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the groups of modules that import each other, each as one line (Tarjan)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    cycles: list[str] = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        stack.append(module)
        for target in imports.get(module, ()):
            if target not in order:
                visit(target)
            if target in stack:
                lowest[module] = min(lowest[module], lowest[target])
        if lowest[module] == order[module]:
            position = stack.index(module)
            group = stack[position:]
            del stack[position:]
            if len(group) > 1:
                cycles.append(" ".join(sorted(group)))

    for module in imports:
        if module not in order:
            visit(module)
    return cycles


def _imports(root: Path, trees: Mapping[Path, ast.Module]) -> dict[str, set[str]]:
    """Return what each module imports when it is imported."""
    names = {
        ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): tree
        for file, tree in trees.items()
    }
    imports: dict[str, set[str]] = defaultdict(set)
    for module, tree in names.items():
        for node in tree.body:
            if isinstance(node, ast.Import):
                imports[module] |= {alias.name for alias in node.names if alias.name in names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    imports[module].add(whole if whole in names else node.module)
    return {module: {t for t in targets if t in names} for module, targets in imports.items()}


def _ignored_imports(root: Path) -> list[str]:
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings.get("tool", {}).get("importlinter", {}).get("contracts", [])
    return [line for contract in contracts for line in contract.get("ignore_imports", [])]


def _long_functions(trees: Mapping[Path, ast.Module]) -> Iterator[str]:
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, _Function) and count_statements(node) - 1 > LONG_FUNCTION:
                yield f"{file}:{node.lineno} {node.name}"


def _untyped_settings(texts: Mapping[Path, str], trees: Mapping[Path, ast.Module]) -> Iterator[str]:
    """Yield where settings are a dictionary: annotations, and look-ups of a RunSpec's config."""
    for file, tree in trees.items():
        for node in ast.walk(tree):
            annotation: Any = getattr(node, "annotation", None)
            name = node.arg if isinstance(node, ast.arg) else ""
            if isinstance(node, ast.AnnAssign):
                name = ast.unparse(node.target).rpartition(".")[2]
            if annotation is None or not _SETTINGS_NAME.match(name):
                continue
            if _SETTINGS_AS_DICT.match(ast.unparse(annotation)):
                yield f"{file}:{node.lineno} {name}"  # type: ignore[attr-defined]
        for number, line in enumerate(texts[file].splitlines(), 1):
            if _RAW_LOOKUP.search(line):
                yield f"{file}:{number} {line.strip()}"


def _stray_tests(root: Path, packages: Sequence[str]) -> Iterator[str]:
    """Yield the unit tests of a package that has no module of their name."""
    for package in packages:
        modules = {file.stem for file in (root / package).rglob("*.py")}
        modules |= {file.parent.name for file in (root / package).rglob("__init__.py")}
        for test in sorted((root / "tests" / "unit" / package).rglob("test_*.py")):
            if test.stem.removeprefix("test_") not in modules:
                yield str(test.relative_to(root))


def _archaic_words(files: Iterable[Path]) -> Iterator[str]:
    for file in files:
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            for word in re.findall(r"[A-Za-z]+", line.replace("_", " ")):
                if word.lower() in ARCHAIC:
                    yield f"{file}:{number} {word}"
