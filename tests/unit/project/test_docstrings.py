"""Docstrings name exceptions that exist."""

from __future__ import annotations

import builtins
import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[3]
PACKAGES: Final = [folder.parent for folder in sorted(ROOT.glob("*/__init__.py"))]
# Read by patterns: parsing every file takes seconds.
RAISES: Final = re.compile(r"^( *)Raises:\n((?:\1 {4}.*\n)+)", re.MULTILINE)
EXCEPTION: Final = re.compile(r"^ +([A-Za-z_][\w.]*(?:(?:, | or )[\w.]+)*): ", re.MULTILINE)
CLASS: Final = re.compile(r"^ *class (\w+)", re.MULTILINE)
IMPORT: Final = re.compile(r"^ *(?:from [\w.]+ )?import (\([^)]*\)|[^\n]*)", re.MULTILINE)


def known_names(text: str) -> set[str]:
    """Return the classes that a module defines and the names that it imports."""
    imported = [re.split(r",\s*", words.strip("()\n ")) for words in IMPORT.findall(text)]
    aliases = [
        name.split(" as ")[-1].partition(".")[0].strip() for part in imported for name in part
    ]
    return {*CLASS.findall(text), *aliases}


def raised_names(text: str) -> set[str]:
    """Return the exceptions of a module's sections ``Raises``, as they are written there."""
    sections = [
        re.sub(rf"(?m)^{margin} {{4}} +.*\n", "", body) for margin, body in RAISES.findall(text)
    ]
    written = [names for section in sections for names in EXCEPTION.findall(section)]
    return {name for names in written for name in re.split(", | or ", names)}


def test_raised_exceptions_exist() -> None:
    folders = [package for package in PACKAGES if package.name not in {"tests", "tools"}]
    paths = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    texts = {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in paths}
    known = {name for text in texts.values() for name in known_names(text)} | set(dir(builtins))
    raised = [(path, name) for path, text in texts.items() for name in raised_names(text)]
    assert len(raised) > 500
    assert [f"{path}: {name}" for path, name in raised if name.partition(".")[0] not in known] == []
