"""Runs the notebooks in examples/, cell by cell under a running event loop, as Jupyter does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

EXAMPLES: Final = Path(__file__).parents[2] / "examples"
# Reads the notebook's path; cells may await.
RUNNER: Final = """\
import ast, asyncio, inspect, json, sys
async def run(cells):
    names = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        code = compile(cell, f"cell {number}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if inspect.isawaitable(result := eval(code, names)):
            await result
with open(sys.argv[1], encoding="utf-8") as file:
    cells = json.load(file)["cells"]
asyncio.run(run(["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]))
"""


def run_notebooks(folder: Path) -> dict[str, str]:
    """Run each notebook in ``folder``, and return how each failed, empty if it did not."""
    failures = {}
    for path in sorted(EXAMPLES.glob("*.ipynb")):
        done = subprocess.run(
            [sys.executable, "-c", RUNNER, str(path)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
            capture_output=True,
            text=True,
            check=False,
        )
        failures[path.name] = done.stderr[-500:] if done.returncode else ""
    return failures
