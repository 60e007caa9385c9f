"""How charts were shown last: kept privately, and nothing that a browser may not keep."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

from rlearner.console.chart_view import MAX_BYTES, ChartView

VIEW: dict[str, Any] = {
    "smoothing": 0.25,
    "axis": "time",
    "order": ["Reward", "Success rate"],
    "hidden": ["Idle share"],
    "wide": [],
    "lines": {"reward/max": True},
}


def test_view_is_kept_in_a_private_file(tmp_path: Path) -> None:
    view = ChartView(tmp_path / "new" / "charts.json")
    assert view.read() is None
    view.write(VIEW)
    assert view.read() == VIEW
    assert stat.S_IMODE(view.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(view.path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "sent",
    [
        None,
        "Reward",
        {**VIEW, "smoothing": "much"},
        {**VIEW, "order": [1]},
        {**VIEW, "lines": {"reward/max": "yes"}},
        {**VIEW, "else": 1},
        {**VIEW, "order": ["x" * MAX_BYTES]},
    ],
)
def test_anything_else_changes_nothing(sent: Any, tmp_path: Path) -> None:
    view = ChartView(tmp_path / "charts.json")
    view.write(VIEW)
    view.write(sent)
    assert view.read() == VIEW


@pytest.mark.parametrize("text", ["", "{", "[]", '{"order": 3}', '"' + "x" * MAX_BYTES + '"'])
def test_damaged_file_is_as_none(text: str, tmp_path: Path) -> None:
    view = ChartView(tmp_path / "charts.json")
    view.path.write_text(text)
    assert view.read() is None


def test_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    view = ChartView(tmp_path / "file" / "charts.json")
    view.write(VIEW)
    assert view.read() is None


def test_place_is_the_cache_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert ChartView().path == tmp_path / "rlearner" / "console" / "charts.json"
