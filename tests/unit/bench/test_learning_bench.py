"""The learning bench: a short run over the real ledger is exactly as late as it says, and its
figures are worked out right.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.learning import figures, pool, report, settings
from bench.learning.arm import TrainingArm, run_arm
from broker.settings.runspec import load, validate
from rlearner_text.config import TinyModel
from rlearner_text.tiny import build_tiny

TINY = {
    "hidden_size": 16,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
    "intermediate_size": 32,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_tiny(tmp_path_factory.mktemp("model") / "tiny", TinyModel(**TINY)))


def config(*overrides: str) -> dict[str, Any]:
    small = [
        "train.warmup_steps=0",
        "train.groups_per_step=2",
        "domains.lake.group_size=3",
        "domains.lake.max_turns=3",
        "eval.tasks=4",
        "train.num_threads=1",
    ]
    return validate(load("configs/quickstart.yaml", [*settings.COMMON, *small, *overrides]))


def test_every_group_is_trained_exactly_so_late(model: str) -> None:
    # Five steps, two versions late: the groups of steps 0, 1 and 2 are granted at version 0, those
    # of 3 at 1, those of 4 at 2.
    arm = TrainingArm(config("train.steps=5", "train.max_staleness=2"), model)
    asyncio.run(arm.run())
    assert arm.lateness == [(0, 0), (1, 1), (2, 2), (2, 2), (2, 2)]
    counts = arm.ledger.counts()
    assert (counts["issued"], counts["trained"], counts["open"]) == (10, 10, 0)
    assert arm.hub.version == arm.ledger.state.version == 5


def test_an_arm_trains_and_measures(model: str) -> None:
    found = run_arm(
        config("train.steps=2", "train.max_staleness=0", "algorithm=remax", "eval.group_size=2"),
        model,
    )
    assert found["lateness"] == [(0, 0), (0, 0)]
    assert len(found["solved"]) == 4
    assert found["episodes_per_map"] == 2
    assert len(found["curve"]) == 2
    # engine and trainer agree on what was sampled
    assert found["last"]["rollout_corr/ess"] == pytest.approx(1, abs=1e-5)


def test_replaced_groups_are_played_by_the_version_that_asked_for_them(model: str) -> None:
    # A model that has learnt nothing solves nothing, so every group is filtered until the bound of
    # one a step is reached.
    arm = TrainingArm(
        config(
            "train.steps=2",
            "train.max_staleness=0",
            "algorithm=dapo",
            "algorithm.max_replacements_per_step=1",
        ),
        model,
    )
    asyncio.run(arm.run())
    assert arm.lateness == [(0, 0), (0, 0)]
    assert arm.ledger.counts()["trained"] == 4
    assert arm.ledger.counts()["issued"] == 4 + arm.ledger.counts()["filtered"]


def test_only_results_with_these_settings_count(tmp_path: Path) -> None:
    arm = settings.algorithm("gspo", 1)
    assert pool.result(tmp_path, arm) is None
    (tmp_path / arm.path).parent.mkdir()
    (tmp_path / arm.path).write_text(json.dumps({"overrides": list(arm.overrides)}))
    assert pool.result(tmp_path, arm) == {"overrides": list(arm.overrides)}
    (tmp_path / arm.path).write_text(json.dumps({"overrides": [*arm.overrides, "train.lr=1.0"]}))
    assert pool.result(tmp_path, arm) is None


def test_workers_get_their_arms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = tmp_path / "python"
    reply = f'while read -r line; do echo "$line" >>{tmp_path}/lines; echo "{{}}"; done'
    worker.write_text(f"#!/bin/sh\n{reply}\n")
    worker.chmod(0o755)
    monkeypatch.setattr(pool.sys, "executable", str(worker))
    arms = [settings.algorithm("opo", 0), settings.algorithm("sapo", 0)]
    pool.run(arms, tmp_path, {"full": "model"}, num_workers=1)
    lines = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    assert [(line["arm"]["name"], line["warm_start"]) for line in lines] == [
        ("opo", "model"),
        ("sapo", "model"),
    ]


def test_every_arm_has_a_valid_configuration_and_a_place_of_its_own() -> None:
    arms = settings.plan(settings.SEEDS, quick=False)
    assert len({arm.path for arm in arms}) == len(arms)
    assert len(settings.plan([0], quick=True)) == 2 + len(settings.presets())
    some = settings.plan([0], quick=True, names=["sapo", "opo"])
    assert [arm.name for arm in some if arm.sweep == "algorithms"] == ["sapo", "opo"]
    assert {
        name for name in settings.presets() if settings.algorithm(name, 0).context == "steps"
    } == {"gigpo"}
    assert [arm.context for arm in settings.starts(0)] == ["full", "steps"]
    for arm in (
        *settings.starts(0),
        settings.algorithm("raft++", 1),
        settings.stale("gspo", 16, 2),
    ):
        assert arm.config()["eval"]["tasks"] == 512


def test_figures() -> None:
    def solved(*numbers: int) -> dict[str, Any]:
        return {"solved": list(numbers), "episodes_per_map": 2, "cpu_s": 3.0}

    # 2/8; 5/8 and 7/8
    start, seeds = [solved(0, 1, 0, 1)], [solved(1, 1, 2, 1), solved(1, 2, 2, 2)]
    row = figures.algorithm_rows({"x": start}, {"x": seeds})["x"]
    assert (row["start"], row["end"], row["ratio"], row["seeds"], row["seconds"]) == (
        0.25,
        0.75,
        3.0,
        2,
        3.0,
    )
    assert 0.5 <= row["low"] < 0.75 < row["high"] <= 1
    assert figures.interval([solved(2, 2, 2)], np.random.default_rng(0)) == (1.0, 1.0)
    rows = figures.staleness_rows(
        {"tis": {"0": [seeds[1]], "4": [seeds[0]]}, "gspo": {"0": seeds, "4": seeds}}
    )
    assert figures.loss_at(rows, ["tis", "gspo"], "4") == pytest.approx(0.125)  # (0.25 + 0) / 2
    assert figures.loss_at(rows, ["tis", "gspo"], "8") is None


def test_a_report_keeps_what_people_wrote(tmp_path: Path) -> None:
    row = {
        "start": 0.2,
        "end": 0.25,
        "ratio": 1.25,
        "low": 0.2,
        "high": 0.3,
        "seeds": 1,
        "seconds": 3.0,
    }
    found = {"algorithms": {"grpo": row}, "staleness": {}}
    (tmp_path / "learning.md").write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    report.write(tmp_path, found, {"grpo": [[0.0, 0.5]]})
    text = (tmp_path / "learning.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| `grpo` | 0.250 | 0.200-0.300 | 1.25 **(below 1.5)** | 1 | 3 | none |" in text
    assert (tmp_path / "learning.png").stat().st_size > 0
