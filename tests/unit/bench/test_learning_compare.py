"""Comparing algorithms on one configuration: equal samples from one model, results that are kept,
prompts that must be alike.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from bench.learning import compare
from broker.errors import ConfigError

SMALL = [
    "model.tiny.hidden_size=16",
    "model.tiny.num_layers=1",
    "model.tiny.num_heads=2",
    "model.tiny.num_kv_heads=1",
    "model.tiny.head_dim=8",
    "model.tiny.intermediate_size=32",
    "warm_start.steps=0",
    "train.steps=2",
    "train.groups_per_step=2",
    "domains.lake.group_size=3",
    "domains.lake.max_turns=3",
    "eval.tasks=4",
]


def options(out: Path, *overrides: str) -> argparse.Namespace:
    return argparse.Namespace(
        config="configs/quickstart.yaml",
        overrides=[*SMALL, *overrides],
        algorithms="grpo,gigpo",
        seeds=1,
        every=1,
        out=out,
    )


def test_arms_train_on_as_many_episodes_and_are_not_run_again(tmp_path: Path) -> None:
    asked = options(tmp_path, "domains.lake.context=steps")
    first = compare.compare(asked)
    assert sorted(first) == ["gigpo", "grpo", "start"]
    for name in ("grpo", "gigpo"):
        kept = json.loads((tmp_path / f"{name}.seed0.json").read_text())
        assert (kept["tickets"]["issued"], kept["tickets"]["trained"]) == (4, 4)
        assert list(kept["points"]) == ["1", "2"]
        assert first[name]["seeds"] == [kept["points"]["2"]]
        (tmp_path / f"{name}.seed0.json").write_text(
            json.dumps({**kept, "solved": [3, 3, 3, 3], "episodes_per_map": 4})
        )
    assert [compare.compare(asked)[name]["end"] for name in ("grpo", "gigpo")] == [0.75, 0.75]


def test_algorithms_with_other_prompts_are_not_compared(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"domains\.lake\.context.*steps, so that all"):
        compare.compare(options(tmp_path))
