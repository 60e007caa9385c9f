"""What may change when an offline run resumes."""

from __future__ import annotations

from typing import Any

import pytest

from learner.offline.config import first_changed_key

OLD: dict[str, Any] = {
    "model": {"path": "m"},
    "train": {"steps": 10, "steps_between": 1, "device": "cpu", "lora": {"rank": 8}},
    "eval": {"rows": 4},
}


@pytest.mark.parametrize(
    ("section", "value", "changed"),
    [
        ("train", {**OLD["train"], "steps": 20, "device": "cuda"}, None),
        # Begins like a key that may change.
        ("train", {**OLD["train"], "steps_between": 2}, "train.steps_between"),
        ("train", {**OLD["train"], "lora": {"rank": 16}}, "train.lora.rank"),
        ("train", {**OLD["train"], "lora": None}, "train.lora"),
        ("eval", {"rows": 5}, None),
        # Sections that an earlier version did not have.
        ("rollout", {"engine": "hf"}, None),
        ("evaluation", {"rows": 5}, "evaluation"),
        ("model", {"path": "n"}, "model.path"),
    ],
)
def test_first_changed_key(section: str, value: object, changed: str | None) -> None:
    assert first_changed_key(OLD, {**OLD, section: value}) == changed
