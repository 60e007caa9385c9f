"""docs/commands.md is up to date."""

from __future__ import annotations

import pytest

from broker.system import entry
from tools import command_page


def test_command_page_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RL_LOG_FORMAT", "RL_BROKER", "RL_RUN"):
        monkeypatch.delenv(name, raising=False)
    page = command_page.TARGET.read_text(encoding="utf-8")
    assert page == command_page.render(), "run `python -m tools.command_page`"


def test_command_page_has_each_argument() -> None:
    page = command_page.render()
    assert "\n## rlearner up\n\nStart all processes of a run on this machine" in page
    assert "| `--share-gpus` | learner and rollout servers take turns" in page
    assert "\n    rlearner up configs/quickstart.yaml run.name=quick" in page
    assert "## broker dead retry\n" in page


def test_each_exit_code_is_in_the_table() -> None:
    constants = {name: value for name, value in vars(entry).items() if name.startswith("EXIT_")}
    codes = {value for value in constants.values() if isinstance(value, int)}
    assert {row.code for row in entry.EXIT_CODES} == codes
    page = command_page.render()
    assert all(f"| {code} | " in page for code in codes)
