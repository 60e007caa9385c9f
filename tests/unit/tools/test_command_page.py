"""docs/commands.md is up to date."""

from __future__ import annotations

import pytest

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
