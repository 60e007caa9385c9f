"""How readable the tree is: words, names, folders, imports and sizes, with the worst offenders of
each. Last line JSON.

python -m bench.house [--worst 15]

Counts the tracked files outside tests/, without this one (it holds the word list). Words are
counted in Python and Markdown files, everything else in Python files.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import re
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

_SELF: Final = "bench/house.py"
_ARCHAIC: Final = (
    *("whoever", "beside", "anew", "so many", "mend", "in place of", "meanwhile", "thereby"),
    *("that is none", "is to be", "to be had", "so it is"),
)
_WORDS: Final = re.compile(
    r"\b(?:" + "|".join(word.replace(" ", r"\s+") for word in _ARCHAIC) + r")\b", re.IGNORECASE
)
_PART: Final = re.compile(r"[A-Z]+[0-9]*(?![a-z])|[A-Z][a-z0-9]*")

Graph = Mapping[str, set[str]]  # each module, or room, and those it imports


def archaic(text: str) -> int:
    """How often a word or phrase of the list occurs, as whole words; a phrase may go on in the next
    line.
    """
    return len(_WORDS.findall(text))


def public_classes(tree: ast.Module) -> list[str]:
    """Names of a module's top-level classes that do not start with an underscore."""
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]


def is_one_word(name: str) -> bool:
    """Whether a CamelCase name has one part; an acronym with its digits is one."""
    return len(_PART.findall(name)) <= 1


def repeated(names: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    """Names that more than one module has, with these modules. names: of each module."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for module, its in sorted(names.items()):
        for name in set(its):
            found[name].append(module)
    return {name: modules for name, modules in found.items() if len(modules) > 1}


def modules_per_folder(paths: Iterable[str]) -> Counter[str]:
    """Python files directly in each folder, without __init__.py."""
    return Counter(str(Path(path).parent) for path in paths if Path(path).name != "__init__.py")


def module_name(path: str) -> str:
    """The dotted name of a Python file, of the package for its __init__.py."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(tree: ast.Module, module: str, is_package: bool, known: set[str]) -> set[str]:
    """Return the known modules that a module imports anywhere, without the packages that contain
    them.
    """
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = (
                module.split(".")[: len(module.split(".")) - node.level + is_package]
                if node.level
                else []
            )
            base = ".".join([*parents, *([node.module] if node.module else [])])
            found |= {
                name if (name := f"{base}.{alias.name}") in known else base for alias in node.names
            }
    return (found & known) - {module}


def cycles(graph: Graph) -> list[list[str]]:
    """Groups of two and more nodes of which each reaches every other."""
    reach: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        open_ = [start]
        while open_:
            new = graph.get(open_.pop(), set()) - seen
            seen |= new
            open_ += new
        reach[start] = seen
    groups = {
        tuple(sorted(other for other in reach[node] if node in reach.get(other, ())))
        for node in graph
    }
    return sorted(list(group) for group in groups if len(group) > 1)


def rooms(graph: Graph, package: str) -> Counter[tuple[str, str]]:
    """How many imports lead from one room of a package to another; a room is a subpackage, or a
    module next to them.
    """
    inside = {
        name: ".".join(name.split(".")[:2]) for name in graph if name.startswith(f"{package}.")
    }
    pairs = ((inside[a], inside[b]) for a in inside for b in graph[a] if b in inside)
    return Counter(pair for pair in pairs if pair[0] != pair[1])


def upward(arrows: Mapping[tuple[str, str], int]) -> dict[tuple[str, str], int]:
    """The arrows that point up when rooms are ordered to leave few of them: none where the rooms
    have no cycle.

    The order is greedy (Eades, Lin and Smyth 1993), so the figure is an upper bound of the fewest.
    """
    left = {room for pair in arrows for room in pair}
    top: list[str] = []
    bottom: list[str] = []
    while left:
        out = {
            room: sum(n for (a, b), n in arrows.items() if a == room and b in left) for room in left
        }
        into = {
            room: sum(n for (a, b), n in arrows.items() if b == room and a in left) for room in left
        }
        sinks = sorted(room for room in left if not out[room])
        sources = sorted(room for room in left if not into[room])
        if sinks:
            bottom.append(sinks[0])
            left.remove(sinks[0])
        else:
            room = (
                sources[0]
                if sources
                else min(left, key=lambda room: (into[room] - out[room], room))
            )
            top.append(room)
            left.remove(room)
    place = {room: n for n, room in enumerate([*top, *reversed(bottom)])}
    return {(a, b): n for (a, b), n in arrows.items() if place[a] > place[b]}


def quantile(values: Iterable[int], share: float) -> int:
    """The smallest value that at least this share of the values does not exceed; 0 without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0


def function_lines(tree: ast.Module) -> dict[str, int]:
    """Lines of each function and method from def to its end, named with its first line."""
    found = (
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return {
        f"{node.lineno} {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for node in found
    }


def _tracked() -> dict[str, str]:
    """The text of each Python and Markdown file that git tracks outside tests/, except this file."""
    command = ["git", "ls-files", "*.py", "*.md"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    kept = [
        path
        for path in listed
        if not path.startswith("tests/") and path != _SELF and Path(path).is_file()
    ]
    return {path: Path(path).read_text() for path in kept}


def _show(title: str, figures: Mapping[str, int], worst: int) -> None:
    print(f"{title}:")
    for name, n in sorted(figures.items(), key=lambda item: (-item[1], item[0]))[:worst]:
        print(f"  {n:6} {name}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worst", type=int, default=15, help="lines of each list of offenders")
    worst = parser.parse_args().worst
    texts = _tracked()
    trees = {path: ast.parse(text) for path, text in texts.items() if path.endswith(".py")}
    words = {path: n for path, text in texts.items() if (n := archaic(text))}
    classes = {path: public_classes(tree) for path, tree in trees.items()}
    one_word = {path: n for path, names in classes.items() if (n := sum(map(is_one_word, names)))}
    names = repeated(classes)
    folders = modules_per_folder(trees)
    known = {module_name(path) for path in trees}
    graph = {
        (own := module_name(path)): imports(tree, own, path.endswith("__init__.py"), known)
        for path, tree in trees.items()
    }
    rings = cycles(graph)
    packages = sorted({name.split(".")[0] for name in graph})
    up = {pair: n for package in packages for pair, n in upward(rooms(graph, package)).items()}
    lines = {path: len(texts[path].splitlines()) for path in trees}
    sizes = [n for path, n in lines.items() if not path.endswith("__init__.py")]
    functions = {
        f"{path}:{name}": n
        for path, tree in trees.items()
        for name, n in function_lines(tree).items()
        if n > 60
    }
    _show("archaic words", words, worst)
    _show("public classes of one word", one_word, worst)
    several = {f"{name}: {' '.join(its)}": len(its) for name, its in names.items()}
    _show("class names in several modules", several, worst)
    _show("modules in a folder", folders, worst)
    _show("import cycles", {" ".join(ring): len(ring) for ring in rings}, worst)
    _show("upward arrows", {f"{a} -> {b}": n for (a, b), n in up.items()}, worst)
    _show("lines of a file", lines, worst)
    _show("functions over 60 lines", functions, worst)
    figures: dict[str, Any] = {"archaic": sum(words.values())}
    figures |= {
        "one_word_classes": round(
            sum(one_word.values()) / max(1, sum(map(len, classes.values()))), 3
        )
    }
    figures |= {
        "repeated_class_names": len(names),
        "max_modules_per_folder": max(folders.values(), default=0),
    }
    figures |= {
        "import_cycles": len(rings),
        "upward_arrows": sum(up.values()),
        "files_median": quantile(sizes, 0.5),
    }
    figures |= {"files_p90": quantile(sizes, 0.9), "functions_over_60_lines": len(functions)}
    figures |= {"lines": sum(lines.values())}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
