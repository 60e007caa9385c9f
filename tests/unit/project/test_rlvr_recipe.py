"""``configs/rlvr.yaml`` with rows as DeepMath-103K, KodCode-V1 and WebInstruct-verified have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from broker.settings.run_settings import RunSettings
from broker.settings.runspec import load, validate

ROWS: dict[str, dict[str, Any]] = {
    "math": {
        "question": "What is 2 + 2?",
        "final_answer": "4",
        "difficulty": 1.0,
        "topic": "Algebra",
    },
    "code": {
        "style": "instruct",
        "question": "Write a function add(a, b).",
        "solution": "def add(a, b):\n    return a + b",
        "test": "from solution import add\n\ndef test_add():\n    assert add(1, 2) == 3\n",
    },
    "general": {
        "question": "Which gas do plants take in?",
        "answer": "carbon dioxide",
        "answer_type": "String",
        "category": "Biology",
    },
}


def overrides(folder: Path) -> list[str]:
    """Write a file of forty rows for each domain, and return the settings that name them."""
    settings = []
    for name, row in ROWS.items():
        rows = [row | {"question": f"{number}: {row['question']}"} for number in range(40)]
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(each) + "\n" for each in rows))
        settings.append(f"domains.{name}.env_args.path={file}")
    return settings


def test_published_columns_are_read(tmp_path: Path) -> None:
    settings = RunSettings.of_config(validate(load("configs/rlvr.yaml", overrides(tmp_path))))
    assert {name: domain.weight for name, domain in settings.domains.items()} == {
        "math": 40,
        "code": 30,
        "general": 30,
    }
    assert settings.algorithm.adv_estimator == "reinforce"
