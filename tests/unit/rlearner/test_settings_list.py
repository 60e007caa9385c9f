"""``rlearner settings``."""

from __future__ import annotations

import json

import pytest

from rlearner.cli import main


def test_a_word_in_names_or_meanings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings", "max_staleness"]) == 0
    out = capsys.readouterr().out
    assert out == (
        "train.max_staleness: whole number at least 0; default 1\n"
        "    versions a trained token may lag behind\n"
    )
    assert main(["settings", "value model", "--json"]) == 0
    keys = [setting["key"] for setting in json.loads(capsys.readouterr().out)]
    assert keys == ["algorithm.critic.enabled"]


def test_names_of_other_projects(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings", "learning_rate", "--json"]) == 0
    keys = [setting["key"] for setting in json.loads(capsys.readouterr().out)]
    assert keys[0] == "train.lr"


def test_an_unknown_word_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings", "no-such-thing"]) == 2
    assert "'no-such-thing' is in no setting's name or meaning" in capsys.readouterr().err
