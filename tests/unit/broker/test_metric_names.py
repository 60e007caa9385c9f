"""Names of metrics in Prometheus: one rule, and no two of ours are the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from broker.telemetry import families as families_module
from broker.telemetry.families import Families
from broker.telemetry.names import COUNTERS, PATTERNS, prometheus_name
from learner.credit.ledger import Ledger
from learner.credit.ticket_rules import TicketRules

ROOT = Path(__file__).parents[3]
ROOMS = (
    "broker/weights",
    "broker/server",
    "broker/system",
    "learner",
    "rollout",
    "envhub",
    "rewardhub",
)
# beginnings of the names that processes report
GROUPS = "reward|reward_parts|env|eval|response_length|staleness|off_policy|actor|critic|rollout_corr|filter|trainer"
GROUPS += (
    "|disk|broker|rollouter|time|perf|queue|ticket|weights|envhub|rewardhub|rollout|process|turns"
)
REPORTED = re.compile(rf'(f?)"((?:{GROUPS})/[a-z_{{}}./]+[a-z_}}])"')
OTHER_USES = {
    "eval/loss",
    "eval/perplexity",
    "envhub/envs",
    "rewardhub/rewards",
}  # offline training, which no process reports; folders


def reported() -> set[str]:
    """Every name that stands in the code, with a placeholder for what is filled in."""
    found = set()
    for room in ROOMS:
        for file in (ROOT / room).rglob("*.py"):
            for _, name in REPORTED.findall(file.read_text(encoding="utf-8")):
                found.add(re.sub(r"\{[^}]*\}", "x", name))
    return found - OTHER_USES


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
    names = reported() | set(PATTERNS) | {one for one in COUNTERS if "<" not in one}
    assert {
        "actor/grad_norm",
        "weights/failures",
        "envhub/groups",
        "ticket/issued",
        "time/wait_for_batch",
    } <= names
    by_name: dict[str, set[str]] = {}
    for name in names:
        found = prometheus_name(re.sub(r"<\w+>", "x", name))
        assert re.fullmatch(r"rlearner_[a-z0-9_]+", found.sample)
        by_name.setdefault(found.name, set()).add(found.source)
    assert {name: sources for name, sources in by_name.items() if len(sources) > 1} == {}


def test_counters_are_metrics_that_the_code_reports() -> None:
    rules = TicketRules(
        steps=1, groups_per_step=1, max_staleness=0, on_late="wait", seed=0, domains=()
    )
    tickets = {f"ticket/{name}" for name in Ledger(rules).counts()}
    names = reported() | tickets
    unknown = {
        one
        for one in COUNTERS
        if not any(re.fullmatch(re.sub(r"<\w+>", "[a-z_]+", one), it) for it in names)
    }
    assert unknown == set()
    assert tickets - COUNTERS == {"ticket/open"}, "only these go down"


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
