"""What `rlearner.train` makes of a model, data and rewards, without starting a process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

import rlearner
from broker.settings.run_settings import RunSettings
from broker.settings.runspec import check_settings, load
from rewardhub.rewards.base import Score
from rlearner.api import run as run_module

TURNS = [{"role": "user", "content": "1 + 1 = ?"}]


def points(sample: object) -> float:
    return 0.0


class CommandDouble:
    """A command that ends at once; holds what it was started with."""

    started: ClassVar[list[list[str]]] = []

    def __init__(self, words: Sequence[str], folder: Path, functions: Mapping[str, Score]) -> None:
        self.started.append(list(words))
        self.is_running = False

    def events(self) -> list[dict[str, Any]]:
        return []

    def finish(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_module, "FollowedCommand", CommandDouble)


def trained_settings(dataset: Any, **settings: Any) -> RunSettings:
    """The settings of the command, which has checked them and read the data."""
    rlearner.train("tiny", dataset, points, **settings)
    command, path, *overrides, option = CommandDouble.started[-1]
    assert (command, option) == ("up", "--json")
    return check_settings(load(path, overrides))


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"question": "1 + 1 = ?", "answer": 2}, ("question", "answer")),
        ({"prompt": TURNS}, ("prompt", "")),
        ({"prompt": TURNS, "solution": "2", "level": None}, ("prompt", "solution")),
        (
            {"data_source": "x", "prompt": TURNS, "reward_model": {"ground_truth": "2"}},
            ("prompt", "reward_model.ground_truth"),
        ),
    ],
)
@pytest.mark.parametrize("is_file", [False, True])
def test_columns_are_those_of_the_rows(
    row: dict[str, Any], columns: tuple[str, str], is_file: bool, tmp_path: Path
) -> None:
    rows = [row] * 4
    if is_file:
        (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    settings = trained_settings("rows.jsonl" if is_file else rows)
    arguments = settings.domains["main"].env_args
    assert (arguments["question"], arguments["answer"]) == columns
    assert Path(arguments["path"]).is_absolute()
    name = "rows.jsonl" if is_file else "data.jsonl"
    assert Path(arguments["path"]).name == name
    stored = [json.loads(line) for line in Path(arguments["path"]).read_text().splitlines()]
    assert stored == rows


def test_settings_of_the_caller_win() -> None:
    rows = [{"prompt": TURNS, "expected": "2"}] * 4
    length = {"name": "length", "args": {"max_tokens": 16, "cache_tokens": 4}}
    domain = {"group_size": 4, "env_args": {"answer": "expected"}, "rewards": [length]}
    settings = trained_settings(rows, train={"steps": 3}, domains={"main": domain})
    main = settings.domains["main"]
    assert (settings.train.steps, settings.train.groups_per_step, main.group_size) == (3, 8, 4)
    assert main.env_args["answer"] == "expected"
    assert [reward.name.rpartition(":")[2] for reward in main.rewards] == ["length", "points"]
    assert [reward.pool for reward in main.rewards] == ["default", "caller"]


def test_a_missing_file_is_refused_in_the_words_of_check() -> None:
    with pytest.raises(
        rlearner.UserError, match=r"^domains\.main\.env_args\.path: 'no.jsonl' is not"
    ):
        rlearner.train("tiny", "no.jsonl", points)
    assert list(Path().iterdir()) == []


def test_a_run_keeps_what_it_was_given() -> None:
    rlearner.train("tiny", [{"prompt": "hi"}] * 2, points, run={"name": "first", "dir": "kept"})
    kept = yaml.safe_load(Path("kept/first/start.yaml").read_text())
    assert kept["domains"]["main"]["env_args"]["path"] == "${here}/data.jsonl"
    assert Path("kept/first/data.jsonl").stat().st_mode & 0o777 == 0o600
