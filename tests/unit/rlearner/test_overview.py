"""The charts and tiles of a run's overview show declared metrics, by their titles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from broker.telemetry.declarations import MetricDeclaration
from broker.telemetry.names import UNDECLARED, find_metric
from broker.telemetry.run_metrics import RUN_METRICS
from learner.run_folder import RunPlace
from rlearner.console.pages.curves import LAYOUTS
from rlearner.console.pages.overview import SHARES
from rlearner.ops.run_kinds import RunKind, algorithm_name, run_kind

OFFLINE: tuple[RunKind, ...] = ("sft", "dpo", "distill", "rm")


def metrics_of(kind: RunKind) -> set[str]:
    return {*LAYOUTS[kind].tiles, *LAYOUTS[kind].metrics}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_shown_metric_is_declared(kind: RunKind) -> None:
    for name in metrics_of(kind):
        assert find_metric(name).meaning != UNDECLARED, name
    assert all(find_metric(name).title for name in LAYOUTS[kind].tiles)
    assert all(curve.title for curve in LAYOUTS[kind].curves)


def test_titles_are_those_of_the_declarations() -> None:
    assert [curve.title for curve in LAYOUTS["training"].curves] == [
        "Reward",
        "Success rate",
        "Staleness in versions",
        "Idle share",
        "Tokens per second",
        "Seconds of a step",
        "Loss and KL",
        "Entropy and gradient norm",
        "Response length in tokens",
    ]
    assert [find_metric(name).title for name in LAYOUTS["training"].tiles] == [
        "reward",
        "success rate",
        "largest staleness",
        "learner idle",
        "servers idle",
        "tokens per second",
        "entropy",
    ]


@pytest.mark.parametrize("kind", LAYOUTS)
def test_shares_end_at_one(kind: RunKind) -> None:
    shares = [
        curve for curve in LAYOUTS[kind].curves if find_metric(curve.names[0]).unit == "share"
    ]
    assert all(curve.bounds == {"low": 0, "high": 1} for curve in shares)
    assert all(find_metric(name).unit == "share" for name in SHARES)
    assert set(LAYOUTS[kind].always) <= {curve.names[0] for curve in LAYOUTS[kind].curves}


def test_every_metric_of_offline_training_has_a_chart() -> None:
    shown = {name for kind in OFFLINE for name in metrics_of(kind)}

    def is_offline(metric: MetricDeclaration) -> bool:
        return metric.sources == ("offline",) and metric.name != "train/skipped"

    assert {metric.name for metric in RUN_METRICS if is_offline(metric)} <= shown


@pytest.mark.parametrize(
    ("config", "kind", "name"),
    [
        ({"domains": {}, "algorithm": {"adv_estimator": "grpo", "pg_variant": "gspo"}},
         "training", "grpo with gspo"),
        ({"domains": {}, "algorithm": {"adv_estimator": "rloo", "pg_variant": "ppo", "correction": "tis"}},
         "training", "rloo with ppo with tis"),
        ({"domains": {}, "algorithm": {"adv_estimator": "gae", "pg_variant": "ppo", "correction": "none"}},
         "training", "gae with ppo"),
        ({"data": {"train": "a.jsonl"}}, "sft", "sft"),
        ({"data": {"train": "a.jsonl"}, "dpo": {"loss": "dpo"}}, "dpo", "dpo"),
        ({"data": {"train": "a.jsonl"}, "dpo": {"loss": "ipo"}}, "dpo", "dpo with ipo"),
        ({"data": {"train": "a.jsonl"}, "rm": {"center": 0.1}}, "rm", "rm"),
        ({"data": {"train": "a.jsonl"}, "distill": {"kl": "reverse"}}, "distill",
         "distill with reverse KL"),
        ({}, "training", ""),
    ],
)  # fmt: skip
def test_kind_and_algorithm_of_a_run(
    tmp_path: Path, config: dict[str, Any], kind: RunKind, name: str
) -> None:
    run = RunPlace("a", tmp_path, config)
    assert run_kind(run) == kind
    assert algorithm_name(run) == name


def test_an_evaluation_has_no_algorithm(tmp_path: Path) -> None:
    config = {"domains": {}, "algorithm": {"adv_estimator": "grpo"}}
    (tmp_path / "result.json").touch()
    run = RunPlace("a", tmp_path, config)
    assert run_kind(run) == "evaluation"
    assert algorithm_name(run) == ""
