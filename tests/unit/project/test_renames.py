"""Files are renamed in two modules only, which also flush the folder: a power loss must not undo a
rename.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = (
    "broker",
    "rlearner_text",
    "rlearner_sandbox",
    "rlearner_workers",
    "learner",
    "rlearner",
    "rollout",
    "envhub",
    "rewardhub",
    "bench",
)
ALLOWED = {
    "broker/system/private_files.py",
    "broker/system/log_rotation.py",
    "rlearner_text/atomic_folders.py",
}
FUNCTIONS = {"os.replace", "os.rename", "os.renames", "shutil.move"}


def renames(source: str) -> list[int]:
    """Return the lines of calls that rename: the functions above, and Path.replace and Path.rename.

    Those take one positional argument; str.replace takes two, and the replace of dates and records
    keywords.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module in ("os", "shutil"):
            found += [node.lineno for one in node.names if f"{node.module}.{one.name}" in FUNCTIONS]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            is_method = (
                node.func.attr in ("replace", "rename")
                and len(node.args) == 1
                and not node.keywords
            )
            if ast.unparse(node.func) in FUNCTIONS or is_method:
                found.append(node.lineno)
    return found


def test_only_two_modules_rename() -> None:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert len(files) > 300
    found = {
        str(path.relative_to(ROOT)): lines
        for path in files
        if (lines := renames(path.read_text("utf-8")))
    }
    assert found.keys() <= ALLOWED, (
        "use broker.system.private_files: private_write, draft_of or replace"
    )


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("import os\nos.replace(a, b)", [2]),
        ("os.rename(a, b)", [1]),
        ("from os import replace", [1]),
        ("shutil.move(a, b)", [1]),
        ("path.replace(target)", [1]),
        ("Path(a).rename(b)", [1]),
        ("'a'.replace('a', 'b')", []),
        ("now.replace(hour=1)", []),
        ("dataclasses.replace(one, a=1)", []),
        ("from dataclasses import replace", []),
    ],
)
def test_renames_are_recognized(source: str, lines: list[int]) -> None:
    assert renames(source) == lines
