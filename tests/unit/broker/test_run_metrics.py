"""Declared metrics: their names in Prometheus follow one rule, and no two are the same."""

from __future__ import annotations

import re

import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from broker.telemetry import families as families_module
from broker.telemetry.declarations import MetricDeclaration
from broker.telemetry.families import Families
from broker.telemetry.names import prometheus_name
from broker.telemetry.run_metrics import RUN_METRICS
from learner.credit.ledger import Ledger
from learner.credit.ticket_rules import TicketRules


@pytest.mark.parametrize(
    ("metric", "sample", "labels", "scale"),
    [
        ("reward/mean", "rlearner_reward_mean", {}, 1),
        ("reward/lake/mean", "rlearner_reward_domain_mean", {"domain": "lake"}, 1),
        ("env/domain/lake/success_rate", "rlearner_env_domain_success_rate", {"domain": "lake"}, 1),
        ("env/my.moves", "rlearner_env_my_moves", {}, 1),
        ("eval/random/success_rate", "rlearner_eval_policy_success_rate", {"policy": "random"}, 1),
        (
            "eval/random/domain/lake/success_rate",
            "rlearner_eval_policy_domain_success_rate",
            {"policy": "random", "domain": "lake"},
            1,
        ),
        (
            "eval/domain/lake/success_rate",
            "rlearner_eval_domain_success_rate",
            {"domain": "lake"},
            1,
        ),
        ("eval/pass@4", "rlearner_eval_pass_4", {}, 1),
        ("reward_parts/format/mean", "rlearner_reward_parts_reward_mean", {"reward": "format"}, 1),
        ("ticket/issued", "rlearner_ticket_issued_total", {}, 1),
        ("ticket/open", "rlearner_ticket_open", {}, 1),
        (
            "ticket/closed_env_error",
            "rlearner_ticket_closed_reason_total",
            {"reason": "env_error"},
            1,
        ),
        ("rollout/finished/stop", "rlearner_rollout_finished_reason_total", {"reason": "stop"}, 1),
        ("time/generate", "rlearner_time_generate_seconds", {}, 1),
        ("time/env_step", "rlearner_time_env_step_seconds", {}, 1),
        ("process/cpu_s", "rlearner_process_cpu_seconds_total", {}, 1),
        ("perf/tokens_per_s", "rlearner_perf_tokens_per_second", {}, 1),
        ("weights/gbytes_per_s", "rlearner_weights_bytes_per_second", {}, 1e9),
        ("weights/seconds", "rlearner_weights_seconds", {}, 1),
        ("step", "rlearner_step", {}, 1),
    ],
)
def test_the_rule(metric: str, sample: str, labels: dict[str, str], scale: float) -> None:
    found = prometheus_name(metric)
    assert (found.sample, dict(found.labels), found.scale) == (sample, labels, scale)


def test_no_two_metrics_have_the_same_name() -> None:
    by_name: dict[str, set[str]] = {}
    for metric in RUN_METRICS:
        example = re.sub(r"<\w+>", "x", metric.name).replace("*", "x/y")
        prometheus = prometheus_name(example)
        assert re.fullmatch(r"rlearner_[a-z0-9_]+", prometheus.sample)
        by_name.setdefault(prometheus.name, set()).add(metric.name)
    assert {name: metrics for name, metrics in by_name.items() if len(metrics) > 1} == {}
    assert len({metric.name for metric in RUN_METRICS}) == len(RUN_METRICS)


@pytest.mark.parametrize("metric", RUN_METRICS, ids=lambda metric: metric.name)
def test_declared_units_and_meanings(metric: MetricDeclaration) -> None:
    assert metric.meaning[0].isupper()
    assert metric.meaning.endswith(".")
    sample = prometheus_name(metric.name).name
    if sample.endswith("_seconds"):
        assert metric.unit == "seconds"
    if sample.endswith("_bytes"):
        assert metric.unit == "bytes"
    if sample.endswith("_per_second"):
        assert metric.unit.endswith("/s")
    if re.search(r"(_ratio|_rate|_fraction|clipfrac)$", sample):
        assert metric.unit == "share"


def test_tickets_that_are_not_open_only_grow() -> None:
    rules = TicketRules(
        steps=1, groups_per_step=1, max_staleness=0, on_late="wait", seed=0, domains=()
    )
    tickets = {name: prometheus_name(f"ticket/{name}").metric for name in Ledger(rules).counts()}
    growing = {name for name, metric in tickets.items() if metric.kind == "counter"}
    assert growing == tickets.keys() - {"open"}


class Fixed(Collector):
    def __init__(self, families: Families) -> None:
        self._families = families

    def collect(self) -> list[object]:  # type: ignore[override]
        return list(self._families.all())


def text_of(families: Families) -> list[str]:
    registry = CollectorRegistry()
    registry.register(Fixed(families))
    return [
        line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")
    ]


def test_samples_have_the_labels_of_their_process(caplog: pytest.LogCaptureFixture) -> None:
    families_module._reported_names.clear()
    families, labels = Families(), {"run": "quick", "role": "learner", "id": "learner"}
    values = {
        "reward/mean": 0.5,
        "reward/lake/mean": 0.25,
        "ticket/issued": 8.0,
        "time": 1.0,
        "actor/lr": float("nan"),
    }
    families.metrics(values | {"env/a.b": 1.0, "env/a_b": 2.0, "weights/gbytes_per_s": 2.0}, labels)
    where = 'id="learner",role="learner",run="quick"'
    assert sorted(text_of(families)) == [
        f"rlearner_env_a_b{{{where}}} 1.0",
        f'rlearner_reward_domain_mean{{domain="lake",{where}}} 0.25',
        f"rlearner_reward_mean{{{where}}} 0.5",
        f"rlearner_ticket_issued_total{{{where}}} 8.0",
        f"rlearner_weights_bytes_per_second{{{where}}} 2e+09",
    ]
    families.metrics({"env/a_b": 3.0}, labels)
    said = [record.message for record in caplog.records if "several metrics" in record.message]
    assert said == [
        "several metrics are called rlearner_env_a_b in Prometheus; one of them is shown"
    ]
