"""The notebook of examples/ runs as it is: its code cells, under a running event loop.

The cells are executed here and not by a kernel, which needs fifty packages more. What a kernel adds
is tested with doubles: the display, in tests/unit/rlearner/test_progress_line.py.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first_run.ipynb"


def code_cells() -> list[dict[str, Any]]:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_holds_no_outputs() -> None:
    assert [(cell["outputs"], cell["execution_count"]) for cell in code_cells()] == [
        ([], None)
    ] * len(code_cells())


def test_the_notebook_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}

    async def execute() -> None:
        for number, cell in enumerate(code_cells(), 1):
            code = compile("".join(cell["source"]), f"cell_{number}.py", "exec")
            exec(code, names)

    asyncio.run(execute())
    table = names["metrics"]
    rows = table if isinstance(table, list) else table.to_dict("records")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    assert rows[-1]["reward/mean"] == rows[-1]["reward_parts/vowel_share/mean"]
    assert "step 4/4  reward" in capsys.readouterr().out
    assert [path.is_dir() for path in (tmp_path / "runs").iterdir()] == [True, True]
