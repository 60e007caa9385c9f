"""What Python code passes to a run: settings as overrides, and rows."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from broker.errors import UserError
from rlearner.api.plain_values import format_overrides, read_dataset


class DatasetDouble:
    """Rows as a ``datasets.Dataset`` gives them: by iteration."""

    def __iter__(self) -> Any:
        return iter([{"question": "1 + 1?", "answer": "2", "score": np.float32(0.5)}])

    def to_dict(self) -> dict[str, list[str]]:
        return {"question": ["1 + 1?"]}


class FrameDouble(DatasetDouble):
    """Rows as a DataFrame gives them: by ``to_dict``."""

    def iterrows(self) -> None: ...

    def notna(self) -> FrameDouble:
        return self

    def astype(self, kind: type) -> FrameDouble:
        assert kind is object
        return self

    def where(self, present: FrameDouble, value: None) -> FrameDouble:
        return present

    def to_dict(self, orient: str = "dict") -> Any:
        assert orient == "records"
        return [{"question": "frame"}]


def test_nested_settings_become_overrides() -> None:
    overrides = format_overrides(
        {
            "train": {"steps": 3, "lr": 1e-6},
            "model": {"path": Path("my model"), "tiny": {}},
            "domains": {"main": {"rewards": [{"name": "length"}], "system_prompt": "über 😀: #"}},
            "algorithm": "grpo",
        }
    )
    assert overrides[0] == "train.steps=3"
    values = {key: yaml.safe_load(text) for key, _, text in (o.partition("=") for o in overrides)}
    assert float(values.pop("train.lr")) == 1e-6
    assert values == {
        "train.steps": 3,
        "model.path": "my model",
        "model.tiny": {},
        "domains.main.rewards": [{"name": "length"}],
        "domains.main.system_prompt": "über 😀: #",
        "algorithm": "grpo",
    }


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"train.steps": 3}, "train.steps: 3 is not allowed; nested mappings: train={\"steps\": ...}"),
        ({"train": {"lr": float("nan")}}, "settings.train.lr: nan is not allowed; a text, a finite"),
        ({"model": {"path": {1, 2}}}, "settings.model.path: {1, 2} is not allowed; a text, a finite"),
    ],
)  # fmt: skip
def test_other_settings_are_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        format_overrides(sections)
    assert str(caught.value).startswith(message)


def test_rows_are_read_from_lists_datasets_and_frames() -> None:
    rows = [{"prompt": [{"role": "user", "content": "hi"}], "label": None}]
    assert read_dataset(rows) == rows
    assert read_dataset([{"day": date(2026, 11, 27)}]) == [{"day": "2026-11-27"}]
    assert read_dataset(DatasetDouble()) == [{"question": "1 + 1?", "answer": "2", "score": 0.5}]
    assert read_dataset(FrameDouble()) == [{"question": "frame"}]


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ([], "dataset: it has no rows"),
        (["text"], "dataset: row 0 is str, not a mapping of columns"),
        ({"train": [1], "test": [2]}, "dataset: expected rows, found dict; choose a split: train, test"),
        (3, "dataset: expected rows, found int"),
        ([{"image": b"x"}], "dataset.0.image: b'x' is not allowed; a text, a finite number"),
    ],
)  # fmt: skip
def test_what_holds_no_rows_is_refused(dataset: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        read_dataset(dataset)
    assert str(caught.value).startswith(message)
