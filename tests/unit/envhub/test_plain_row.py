"""The row of a task, from its data set to the rewards: JSON values, bounded in size."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from envhub_kit import domain

from envhub.envs.base import Observation
from envhub.envs.plain_row import (
    MAX_ROW_BYTES,
    MAX_ROW_ITEMS,
    BadRowError,
    fitting_columns,
    plain_row,
)
from envhub.workers.returned import ReturnedValueError, row

ODD = {"image": np.zeros(3), "huge": 1 << 70, "half": "\ud83d"}


def test_a_row_becomes_json_values() -> None:
    values = {
        "text": "é", "list": (1, 2.5), "nested": {"a": [None, True]}, "bytes": b"\x01",
        "time": datetime.datetime(2026, 1, 2, 3, 4, 5), "nan": float("nan"),
    }  # fmt: skip
    assert plain_row(values) == {
        "text": "é", "list": [1, 2.5], "nested": {"a": [None, True]}, "bytes": "AQ==",
        "time": "2026-01-02T03:04:05", "nan": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([1], "a list, not a mapping of names to JSON values"),
        ({1: "a"}, "a dict, not a mapping of names to JSON values"),
        *(({name: value}, f"column '{name}' JSON cannot express") for name, value in ODD.items()),
        ({"a": 1, "b": "x" * MAX_ROW_BYTES}, "most of them in 'b'; the limit is 1048576"),
        ({"a": [0] * MAX_ROW_ITEMS}, "a row of 20002 values; the limit is 20000"),
    ],
)
def test_a_row_of_an_environment_that_is_none_is_refused(value: Any, words: str) -> None:
    with pytest.raises(BadRowError, match=words):
        plain_row(value)
    with pytest.raises(ReturnedValueError, match=rf"after reset, row is .*{words}"):
        row("after reset, row", value)


def test_columns_of_a_data_set_that_do_not_fit_are_left_out() -> None:
    half = "x" * (MAX_ROW_BYTES // 2)
    columns = {"first": half, **ODD, "null": None, "second": half, "last": [1]}
    assert fitting_columns(columns) == {"first": half, "null": None, "last": [1]}


def test_a_question_brings_the_columns_of_its_row(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [
        {"question": f"{n}+1", "answer": str(n + 1), "level": n / 4, "extra_info": {"index": n}}
        for n in range(4)
    ]
    file.write_text("".join(json.dumps(each) + "\n" for each in rows))
    qa = domain("qa", env_args={"path": str(file), "eval_share": 0.25}).make()
    observation = qa.reset(0, "eval", seed=0)
    assert isinstance(observation, Observation)
    assert (observation.text, qa.reference, dict(qa.row)) == ("3+1", "4", rows[3])
