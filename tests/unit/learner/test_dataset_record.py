"""A data set that changed since a run began is refused in one line that says what changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from broker.errors import UserError
from broker.settings.run_settings import RunSettings
from broker.settings.runspec import check_settings
from learner.credit.dataset_record import (
    check_datasets,
    check_sources,
    describe_datasets,
    describe_sources,
    note_datasets,
    summarize_rows,
)
from rlearner_text.rows.sources import DataSource

ROWS = [{"question": f"q{number}", "answer": f"a{number}"} for number in range(20)]


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def settings_of(path: Path, **args: Any) -> RunSettings:
    domain = {
        "env": "qa",
        "env_args": {"path": str(path), **args},
        "rewards": [{"name": "math_answer"}],
    }
    return check_settings({"run": {"name": "quick"}, "domains": {"math": domain}})


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """The folder of a run on twenty rows."""
    write_rows(tmp_path / "rows.jsonl", ROWS)
    note_datasets(tmp_path, describe_datasets(settings_of(tmp_path / "rows.jsonl")))
    return tmp_path


def check(folder: Path, *, force: bool = False, **args: Any) -> list[str]:
    old = settings_of(folder / "rows.jsonl").to_plain()
    new = settings_of(folder / "rows.jsonl", **args)
    return check_datasets(folder, new, old, force=force)


def test_summary_of_rows() -> None:
    first = summarize_rows([b"a", b"b", b"a"])
    assert first.num_rows == 3
    assert first == summarize_rows([b"a", b"b", b"a"])
    swapped = summarize_rows([b"b", b"a", b"a"])
    assert (first.ordered == swapped.ordered, first.unordered == swapped.unordered) == (
        False,
        True,
    )


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (ROWS[:-2], "had 20 rows, and has 18"),
        ([*ROWS, {"question": "q", "answer": "a"}], "had 20 rows, and has 21"),
        (ROWS[::-1], "has its rows in another order"),
        ([{"question": "q", "answer": "a"}, *ROWS[1:]], "has other rows"),
    ],
)
def test_changed_data_is_refused(begun: Path, rows: list[dict[str, str]], problem: str) -> None:
    write_rows(begun / "rows.jsonl", rows)
    with pytest.raises(UserError) as caught:
        check(begun)
    change = f"domains.math.env_args: {begun / 'rows.jsonl'} {problem}"
    assert str(caught.value) == (
        f"the data of run quick is not that of its start: {change}; "
        "restore it, choose another run.name, or give --force"
    )
    assert check(begun, force=True) == [change]


def test_same_rows_in_another_form_are_the_same(begun: Path) -> None:
    text = "".join(
        json.dumps({"answer": row["answer"], "question": row["question"]}) + "\n\n" for row in ROWS
    )
    (begun / "rows.jsonl").write_text(text)
    assert check(begun) == []


def test_changed_settings_are_no_changed_data(begun: Path) -> None:
    assert check(begun, max_rows=10) == []


@pytest.mark.parametrize("key", ["data.train", "data.eval"])
def test_data_of_offline_training(tmp_path: Path, key: str) -> None:
    path = tmp_path / "rows.jsonl"
    write_rows(path, ROWS)
    sources = {key: DataSource(str(path)), "none": None}
    record = describe_sources(sources)
    check_sources(tmp_path, "tuned", record)
    note_datasets(tmp_path, record)
    check_sources(tmp_path, "tuned", record)
    write_rows(path, ROWS[1:])
    with pytest.raises(UserError) as caught:
        check_sources(tmp_path, "tuned", describe_sources(sources))
    assert str(caught.value) == (
        f"the data of run tuned is not that of its start: {key}: {path} had 20 rows, and has 19; "
        "restore it, or choose another run.name"
    )


def test_other_data_files_are_compared_by_their_bytes(tmp_path: Path) -> None:
    path = tmp_path / "levels.txt"
    level = "; 1\n#####\n#@$.#\n#####\n"
    path.write_text(level * 4)
    domain = {"env": "sokoban", "env_args": {"path": str(path), "eval_share": 0.5}}
    config = {"run": {"name": "quick"}, "domains": {"box": domain}}
    domain["env_args"]["eval_path"] = str(path)  # type: ignore[index]
    settings = check_settings(config)
    note_datasets(tmp_path, describe_datasets(settings))
    path.write_text(level * 3)
    with pytest.raises(UserError, match=r"levels\.txt changed since then"):
        check_datasets(tmp_path, settings, settings.to_plain(), force=False)
