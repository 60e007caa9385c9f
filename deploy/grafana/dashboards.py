"""Writes the dashboards next to this file: ``python deploy/grafana/dashboards.py``.

Each panel is one line of the tables below: title, unit, and its queries with their legends.
``$run`` is the run that is chosen at the top of a dashboard; ``RUN`` stands for ``run="$run"``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).parent
SCHEMA: Final = 39  # of Grafana 11; newer ones read it
WIDTH, HEIGHT, COLUMNS = 8, 8, 3
SOURCE: Final = {"type": "prometheus", "uid": "${source}"}

Panel = tuple[str, str, dict[str, str]]  # title, unit, legend by query

LEARNER: Final = 'RUN, role="learner"'
RUN: Final[dict[str, list[Panel]]] = {
    "Learning": [
        (
            "Reward",
            "short",
            {
                f"rlearner_reward_mean{{{LEARNER}}}": "mean",
                f"rlearner_reward_domain_mean{{{LEARNER}}}": "{{domain}}",
            },
        ),
        (
            "Success",
            "percentunit",
            {
                f"rlearner_env_success_rate{{{LEARNER}}}": "training",
                f"rlearner_env_domain_success_rate{{{LEARNER}}}": "{{domain}}",
            },
        ),
        (
            "Evaluation",
            "percentunit",
            {
                "rlearner_eval_success_rate{RUN}": "success",
                "rlearner_eval_policy_success_rate{RUN}": "{{policy}}",
            },
        ),
        (
            "Entropy and KL",
            "short",
            {"rlearner_actor_entropy{RUN}": "entropy", "rlearner_actor_ppo_kl{RUN}": "KL"},
        ),
        ("Gradient norm", "short", {"rlearner_actor_grad_norm{RUN}": "gradient norm"}),
        (
            "Response length",
            "short",
            {
                "rlearner_response_length_mean{RUN}": "mean",
                "rlearner_response_length_max{RUN}": "longest",
            },
        ),
    ],
    "Pace": [
        ("Step", "short", {"rlearner_step{RUN}": "step", "rlearner_run_steps{RUN}": "last step"}),
        (
            "Idle shares",
            "percentunit",
            {
                "rlearner_trainer_idle_ratio{RUN}": "learner",
                f"rlearner_rollouter_idle_ratio{{{LEARNER}}}": "servers",
            },
        ),
        (
            "Staleness of trained tokens",
            "short",
            {
                "rlearner_staleness_mean{RUN}": "mean",
                "rlearner_staleness_max{RUN}": "oldest",
                "rlearner_run_max_staleness{RUN}": "bound",
            },
        ),
        (
            "Tokens per second",
            "short",
            {
                f"rlearner_perf_tokens_per_second{{{LEARNER}}}": "trained",
                'sum(rlearner_perf_tokens_per_second{RUN, role="rollout"})': "generated",
            },
        ),
        (
            "A step's time",
            "s",
            {
                "rlearner_time_wait_for_batch_seconds{RUN}": "wait for samples",
                "rlearner_time_train_seconds{RUN}": "train",
                "rlearner_time_offer_weights_seconds{RUN}": "offer weights",
            },
        ),
        (
            "A group's time",
            "s",
            {
                f"rlearner_time_generate_seconds{{{LEARNER}}}": "generate",
                f"rlearner_time_env_step_seconds{{{LEARNER}}}": "environment",
                f"rlearner_time_reward_seconds{{{LEARNER}}}": "reward",
            },
        ),
    ],
    "Tickets": [
        (
            "Open tickets",
            "short",
            {
                "rlearner_ticket_open{RUN}": "open",
                "rlearner_off_policy_in_queue{RUN}": "waiting to be trained",
            },
        ),
        (
            "Outcomes per minute",
            "short",
            {
                "60 * rate(rlearner_ticket_trained_total{RUN}[5m])": "trained",
                "60 * rate(rlearner_ticket_filtered_total{RUN}[5m])": "filtered",
                "60 * rate(rlearner_ticket_dropped_total{RUN}[5m])": "dropped",
                "60 * rate(rlearner_ticket_dead_total{RUN}[5m])": "dead",
            },
        ),
        (
            "Failed groups by reason",
            "short",
            {"rlearner_ticket_closed_reason_total{RUN}": "{{reason}}"},
        ),
        (
            "Length bias of kept episodes",
            "percentunit",
            {"rlearner_off_policy_length_bias{RUN}": "{{id}}"},
        ),
    ],
}
FLEET: Final[dict[str, list[Panel]]] = {
    "Processes": [
        ("Processes", "short", {"rlearner_processes{RUN}": "{{role}}"}),
        ("Take no work", "short", {"rlearner_member_problem{RUN} == 1": "{{role}} {{id}}"}),
        (
            "Policy version",
            "short",
            {
                "rlearner_member_policy_version{RUN}": "{{role}} {{id}}",
                "rlearner_weights_offer_version{RUN}": "on offer",
            },
        ),
        (
            "Used slots",
            "percentunit",
            {"rlearner_member_running{RUN} / rlearner_member_slots{RUN}": "{{role}} {{id}}"},
        ),
        ("Waiting", "short", {"rlearner_member_waiting{RUN}": "{{role}} {{id}}"}),
        (
            "Processor time",
            "short",
            {"rate(rlearner_process_cpu_seconds_total{RUN}[5m])": "{{role}} {{id}}"},
        ),
    ],
    "Generation servers": [
        (
            "Tokens per second",
            "short",
            {'rlearner_perf_tokens_per_second{RUN, role="rollout"}': "{{id}}"},
        ),
        (
            "Idle share",
            "percentunit",
            {'rlearner_rollouter_idle_ratio{RUN, role="rollout"}': "{{id}}"},
        ),
        ("Prefix cache hits", "percentunit", {"rlearner_rollout_prefix_hit_ratio{RUN}": "{{id}}"}),
        (
            "Time of a request",
            "s",
            {'rlearner_time_generate_seconds{RUN, role="rollout"}': "{{id}}"},
        ),
        ("Time of a weight transfer", "s", {"rlearner_weights_seconds{RUN}": "{{role}} {{id}}"}),
        (
            "Failed weight transfers",
            "short",
            {"increase(rlearner_weights_failures_total{RUN}[10m])": "{{role}} {{id}}"},
        ),
    ],
    "Hubs": [
        (
            "Groups per minute",
            "short",
            {
                "60 * rate(rlearner_envhub_groups_total{RUN}[5m])": "{{id}}",
                "60 * rate(rlearner_rewardhub_groups_total{RUN}[5m])": "{{id}}",
            },
        ),
        (
            "Closed per minute",
            "short",
            {
                "60 * rate(rlearner_envhub_closed_total{RUN}[5m])": "{{id}}",
                "60 * rate(rlearner_rewardhub_closed_total{RUN}[5m])": "{{id}}",
            },
        ),
        (
            "Workers that died",
            "short",
            {
                "increase(rlearner_envhub_died_workers_total{RUN}[10m])": "{{id}}",
                "increase(rlearner_rewardhub_killed_workers_total{RUN}[10m])": "{{id}}",
            },
        ),
    ],
}
BROKER: Final[dict[str, list[Panel]]] = {
    "Queues": [
        ("Queue depth", "short", {"rlearner_queue_depth{RUN}": "{{subject}}"}),
        ("Not delivered yet", "short", {"rlearner_queue_pending{RUN}": "{{subject}}"}),
        ("Held by a process", "short", {"rlearner_queue_held{RUN}": "{{subject}}"}),
        ("Redelivered", "short", {"rlearner_queue_redelivered{RUN}": "{{subject}}"}),
        (
            "Processes that wait for messages",
            "short",
            {"rlearner_queue_waiting_pulls{RUN}": "{{subject}}"},
        ),
        ("Dead letters", "short", {"rlearner_dead_letters{RUN}": "{{stream}}"}),
    ],
    "Store": [
        (
            "Store",
            "bytes",
            {
                "rlearner_jetstream_store_bytes{RUN}": "used",
                "rlearner_jetstream_store_limit_bytes{RUN}": "limit",
            },
        ),
        ("Bytes by stream", "bytes", {"rlearner_stream_bytes{RUN}": "{{stream}}"}),
        ("Messages by stream", "short", {"rlearner_stream_messages{RUN}": "{{stream}}"}),
    ],
    "Exporter and disk": [
        ("Broker answers", "short", {"rlearner_exporter_up{RUN}": "up"}),
        (
            "Time since an answer",
            "s",
            {"time() - rlearner_exporter_last_answer_timestamp_seconds{RUN}": "age"},
        ),
        ("Free disk space", "bytes", {"rlearner_disk_free_bytes{RUN}": "{{role}} {{id}}"}),
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
        for index, (head, unit, queries) in enumerate(of_row):
            where = {
                "h": HEIGHT,
                "w": WIDTH,
                "x": WIDTH * (index % COLUMNS),
                "y": y + HEIGHT * (index // COLUMNS),
            }
            panels.append(panel(len(panels) + 1, head, unit, queries, where))
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


def panel(
    number: int, title: str, unit: str, queries: dict[str, str], where: dict[str, int]
) -> dict[str, Any]:
    """Return one chart."""
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": SOURCE,
            "editorMode": "code",
            "range": True,
            "expr": expression.replace("RUN", 'run="$run"'),
            "legendFormat": legend,
        }
        for index, (expression, legend) in enumerate(queries.items())
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
        "title": title,
        "datasource": SOURCE,
        "gridPos": where,
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": unit, "custom": custom}, "overrides": []},
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
