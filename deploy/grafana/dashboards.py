"""Writes the dashboards next to this file: ``python deploy/grafana/dashboards.py``.

Each panel is one row of the tables below: its queries with their legends. Its title, unit and
description are those of the metrics that it shows, as declared in ``broker.telemetry``; a title or
unit in the row replaces them where a panel shows several metrics or computes something.
``$run`` is the run that is chosen at the top of a dashboard; ``RUN`` stands for ``run="$run"``.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from broker.telemetry.names import PREFIX, prometheus_name
from broker.telemetry.page_metrics import PAGE_METRICS
from broker.telemetry.run_metrics import RUN_METRICS

HERE: Final = Path(__file__).parent
SCHEMA: Final = 39  # of Grafana 11; newer ones read it
WIDTH, HEIGHT, COLUMNS = 8, 8, 3
SOURCE: Final = {"type": "prometheus", "uid": "${source}"}

UNITS: Final = {"share": "percentunit", "seconds": "s", "bytes": "bytes"}  # the others: short
METRICS: Final = {
    prometheus_name(re.sub(r"<(\w+)>", r"\1", metric.name)).name: metric for metric in RUN_METRICS
} | {f"{PREFIX}{name}": metric for name, metric in PAGE_METRICS.items()}


@dataclass(frozen=True)
class Panel:
    """A chart: legend by query; title and unit are those of the first metric if empty."""

    queries: dict[str, str]
    title: str = ""
    unit: str = ""


LEARNER: Final = 'RUN, role="learner"'
RUN: Final[dict[str, list[Panel]]] = {
    "Learning": [
        Panel(
            {
                f"rlearner_reward_mean{{{LEARNER}}}": "mean",
                f"rlearner_reward_domain_mean{{{LEARNER}}}": "{{domain}}",
            }
        ),
        Panel(
            {
                f"rlearner_env_success_rate{{{LEARNER}}}": "training",
                f"rlearner_env_domain_success_rate{{{LEARNER}}}": "{{domain}}",
            }
        ),
        Panel(
            {
                "rlearner_eval_success_rate{RUN}": "success",
                "rlearner_eval_policy_success_rate{RUN}": "{{policy}}",
            }
        ),
        Panel(
            {"rlearner_actor_entropy{RUN}": "entropy", "rlearner_actor_ppo_kl{RUN}": "KL"},
            title="Entropy and KL",
        ),
        Panel({"rlearner_actor_grad_norm{RUN}": "gradient norm"}),
        Panel(
            {
                "rlearner_response_length_mean{RUN}": "mean",
                "rlearner_response_length_max{RUN}": "longest",
            }
        ),
    ],
    "Pace": [
        Panel({"rlearner_step{RUN}": "step", "rlearner_run_steps{RUN}": "last step"}),
        Panel(
            {
                "rlearner_trainer_idle_ratio{RUN}": "learner",
                f"rlearner_rollouter_idle_ratio{{{LEARNER}}}": "servers",
            },
            title="Idle shares",
        ),
        Panel(
            {
                "rlearner_staleness_mean{RUN}": "mean",
                "rlearner_staleness_max{RUN}": "oldest",
                "rlearner_run_max_staleness{RUN}": "bound",
            }
        ),
        Panel(
            {
                f"rlearner_perf_tokens_per_second{{{LEARNER}}}": "trained",
                'sum(rlearner_perf_tokens_per_second{RUN, role="rollout"})': "generated",
            }
        ),
        Panel(
            {
                "rlearner_time_wait_for_batch_seconds{RUN}": "wait for samples",
                "rlearner_time_train_seconds{RUN}": "train",
                "rlearner_time_offer_weights_seconds{RUN}": "offer weights",
            },
            title="A step's time",
        ),
        Panel(
            {
                f"rlearner_time_generate_seconds{{{LEARNER}}}": "generate",
                f"rlearner_time_env_step_seconds{{{LEARNER}}}": "environment",
                f"rlearner_time_reward_seconds{{{LEARNER}}}": "reward",
            },
            title="A group's time",
        ),
    ],
    "Tickets": [
        Panel(
            {
                "rlearner_ticket_open{RUN}": "open",
                "rlearner_off_policy_in_queue{RUN}": "waiting to be trained",
            }
        ),
        Panel(
            {
                "60 * rate(rlearner_ticket_trained_total{RUN}[5m])": "trained",
                "60 * rate(rlearner_ticket_filtered_total{RUN}[5m])": "filtered",
                "60 * rate(rlearner_ticket_dropped_total{RUN}[5m])": "dropped",
                "60 * rate(rlearner_ticket_dead_total{RUN}[5m])": "dead",
            },
            title="Outcomes per minute",
        ),
        Panel({"rlearner_ticket_closed_reason_total{RUN}": "{{reason}}"}),
        Panel({"rlearner_off_policy_length_bias{RUN}": "{{id}}"}),
    ],
}
FLEET: Final[dict[str, list[Panel]]] = {
    "Processes": [
        Panel({"rlearner_processes{RUN}": "{{role}}"}),
        Panel({"rlearner_member_problem{RUN} == 1": "{{role}} {{id}}"}),
        Panel(
            {
                "rlearner_member_policy_version{RUN}": "{{role}} {{id}}",
                "rlearner_weights_offer_version{RUN}": "on offer",
            }
        ),
        Panel(
            {"rlearner_member_running{RUN} / rlearner_member_slots{RUN}": "{{role}} {{id}}"},
            title="Used slots",
            unit="percentunit",
        ),
        Panel({"rlearner_member_waiting{RUN}": "{{role}} {{id}}"}),
        Panel(
            {"rate(rlearner_process_cpu_seconds_total{RUN}[5m])": "{{role}} {{id}}"}, unit="short"
        ),
    ],
    "Generation servers": [
        Panel({'rlearner_perf_tokens_per_second{RUN, role="rollout"}': "{{id}}"}),
        Panel({'rlearner_rollouter_idle_ratio{RUN, role="rollout"}': "{{id}}"}),
        Panel({"rlearner_rollout_prefix_hit_ratio{RUN}": "{{id}}"}),
        Panel(
            {'rlearner_time_generate_seconds{RUN, role="rollout"}': "{{id}}"},
            title="Time of a request",
        ),
        Panel({"rlearner_weights_seconds{RUN}": "{{role}} {{id}}"}),
        Panel({"increase(rlearner_weights_failures_total{RUN}[10m])": "{{role}} {{id}}"}),
    ],
    "Hubs": [
        Panel(
            {
                "60 * rate(rlearner_envhub_groups_total{RUN}[5m])": "{{id}}",
                "60 * rate(rlearner_rewardhub_groups_total{RUN}[5m])": "{{id}}",
            },
            title="Groups per minute",
        ),
        Panel(
            {
                "60 * rate(rlearner_envhub_closed_total{RUN}[5m])": "{{id}}",
                "60 * rate(rlearner_rewardhub_closed_total{RUN}[5m])": "{{id}}",
            },
            title="Closed per minute",
        ),
        Panel(
            {
                "increase(rlearner_envhub_died_workers_total{RUN}[10m])": "{{id}}",
                "increase(rlearner_rewardhub_killed_workers_total{RUN}[10m])": "{{id}}",
            },
            title="Workers that died",
        ),
    ],
}
BROKER: Final[dict[str, list[Panel]]] = {
    "Queues": [
        Panel({"rlearner_queue_depth{RUN}": "{{subject}}"}),
        Panel({"rlearner_queue_pending{RUN}": "{{subject}}"}),
        Panel({"rlearner_queue_held{RUN}": "{{subject}}"}),
        Panel({"rlearner_queue_redelivered{RUN}": "{{subject}}"}),
        Panel({"rlearner_queue_waiting_pulls{RUN}": "{{subject}}"}),
        Panel({"rlearner_dead_letters{RUN}": "{{stream}}"}),
    ],
    "Store": [
        Panel(
            {
                "rlearner_jetstream_store_bytes{RUN}": "used",
                "rlearner_jetstream_store_limit_bytes{RUN}": "limit",
            }
        ),
        Panel({"rlearner_stream_bytes{RUN}": "{{stream}}"}),
        Panel({"rlearner_stream_messages{RUN}": "{{stream}}"}),
    ],
    "Exporter and disk": [
        Panel({"rlearner_exporter_up{RUN}": "up"}),
        Panel(
            {"time() - rlearner_exporter_last_answer_timestamp_seconds{RUN}": "age"},
            title="Time since an answer",
            unit="s",
        ),
        Panel({"rlearner_disk_free_bytes{RUN}": "{{role}} {{id}}"}),
    ],
}
DASHBOARDS: Final = {
    "run": ("rlearner: run", RUN),
    "fleet": ("rlearner: fleet", FLEET),
    "broker": ("rlearner: broker", BROKER),
}


def dashboard(name: str) -> dict[str, Any]:
    """Return one dashboard as Grafana reads it."""
    title, rows = DASHBOARDS[name]
    panels: list[dict[str, Any]] = []
    y = 0
    for row, of_row in rows.items():
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row,
                "collapsed": False,
                "panels": [],
                "gridPos": {"h": 1, "w": 24, "x": 0, "y": y},
            }
        )
        y += 1
        for index, chart in enumerate(of_row):
            where = {
                "h": HEIGHT,
                "w": WIDTH,
                "x": WIDTH * (index % COLUMNS),
                "y": y + HEIGHT * (index // COLUMNS),
            }
            panels.append(render_panel(len(panels) + 1, chart, where))
        y += HEIGHT * -(-len(of_row) // COLUMNS)
    source = {
        "name": "source",
        "type": "datasource",
        "query": "prometheus",
        "label": "Source",
        "hide": 0,
    }
    run = {
        "name": "run",
        "type": "query",
        "label": "Run",
        "hide": 0,
        "datasource": SOURCE,
        "refresh": 2,
        "sort": 2,
        "definition": "label_values(rlearner_exporter_up, run)",
        "multi": False,
        "includeAll": False,
        "query": {"query": "label_values(rlearner_exporter_up, run)", "refId": "runs"},
    }
    links = [
        {
            "type": "dashboards",
            "tags": ["rlearner"],
            "title": "rlearner",
            "asDropdown": False,
            "includeVars": True,
            "keepTime": True,
        }
    ]
    return {
        "uid": f"rlearner-{name}",
        "title": title,
        "tags": ["rlearner"],
        "schemaVersion": SCHEMA,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "browser",
        "links": links,
        "annotations": {"list": []},
        "templating": {"list": [source, run]},
        "panels": panels,
    }


def render_panel(number: int, chart: Panel, where: dict[str, int]) -> dict[str, Any]:
    """Return one chart as Grafana reads it."""
    names = dict.fromkeys(re.findall(r"\brlearner_\w+", " ".join(chart.queries)))
    metrics = [METRICS[name.removesuffix("_total")] for name in names]
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": SOURCE,
            "editorMode": "code",
            "range": True,
            "expr": expression.replace("RUN", 'run="$run"'),
            "legendFormat": legend,
        }
        for index, (expression, legend) in enumerate(chart.queries.items())
    ]
    custom = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 0,
        "showPoints": "auto",
        "spanNulls": True,
    }
    return {
        "id": number,
        "type": "timeseries",
        "title": chart.title or metrics[0].heading,
        "description": "\n".join(dict.fromkeys(metric.meaning for metric in metrics)),
        "datasource": SOURCE,
        "gridPos": where,
        "targets": targets,
        "fieldConfig": {
            "defaults": {
                "unit": chart.unit or UNITS.get(metrics[0].unit, "short"),
                "custom": custom,
            },
            "overrides": [],
        },
        "options": {
            "legend": {
                "displayMode": "list",
                "placement": "bottom",
                "showLegend": True,
                "calcs": [],
            },
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
    }


def text_of(name: str) -> str:
    """Return the file of one dashboard."""
    return json.dumps(dashboard(name), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for each in DASHBOARDS:
        (HERE / f"{each}.json").write_text(text_of(each), encoding="utf-8")
