"""How a run's progress looks in a file, a terminal and a notebook."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from rlearner.api.progress_line import ProgressLine

EVENTS: list[dict[str, Any]] = [
    {"event": "phase", "message": "loading the model"},
    {"event": "step", "step": 1, "figures": {"reward/mean": 0.25}},
    {"event": "warning", "message": "cut"},
    {"event": "bottleneck", "message": "not shown"},
    {"event": "step", "step": 2, "figures": {"reward/mean": 0.5}},
]


def show_events() -> None:
    line = ProgressLine("first", 2)
    for event in EVENTS:
        line.show(event)
    line.close()


def test_progress_is_plain_lines_in_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    show_events()
    assert capsys.readouterr().out.splitlines() == [
        "first: loading the model",
        "first: step 1/2  reward 0.250",
        "cut",
        "first: step 2/2  reward 0.500  eta 0:00",
    ]


def test_progress_is_one_line_in_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    show_events()
    assert capsys.readouterr().out == (
        "\r\x1b[2Kfirst: loading the model"
        "\r\x1b[2Kfirst: [##########----------] step 1/2  reward 0.250"
        "\r\x1b[2Kcut\n"
        "\r\x1b[2Kfirst: [####################] step 2/2  reward 0.500  eta 0:00\n"
    )


def test_progress_is_one_output_in_a_notebook(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs: list[str] = []

    def update(text: object) -> None:
        outputs.append(repr(text))

    shell = SimpleNamespace(kernel=object())
    handle = SimpleNamespace(update=update)
    display = SimpleNamespace(display=lambda text, display_id: handle)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "IPython.display", display)  # type: ignore[arg-type]
    show_events()
    assert outputs == [
        "first: loading the model",
        "first: [##########----------] step 1/2  reward 0.250",
        "first: [####################] step 2/2  reward 0.500  eta 0:00",
    ]
    assert capsys.readouterr().out == "cut\n"
