"""Queries of evaluations."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

from learner.evaluation.pass_at_k import success_interval
from rlearner.console.index.answers import EvaluatedTask, EvaluationResult
from rlearner.console.index.artifacts import evaluated_row


def evaluations(connection: sqlite3.Connection) -> list[EvaluationResult]:
    rows = connection.execute(
        "SELECT e.step, e.policy, s.mtime, e.domain, e.episodes, e.successes, e.reward_sum"
        " FROM evaluated e JOIN sources s ON s.id = e.source ORDER BY e.step, e.policy, e.number"
    ).fetchall()
    grouped: dict[tuple[int, str], list[tuple[Any, ...]]] = {}
    for row in rows:
        grouped.setdefault((row[0], row[1]), []).append(row)
    return [_evaluation_result(own) for own in grouped.values()]


def _evaluation_result(rows: list[tuple[Any, ...]]) -> EvaluationResult:
    step, policy, mtime = rows[0][:3]
    tries = [[True] * row[5] + [False] * (row[4] - row[5]) for row in rows if row[4]]
    low, high = success_interval(tries) if tries else (0.0, 1.0)
    episodes = sum(row[4] for row in rows)
    successes = sum(row[5] for row in rows)
    domains: dict[str, list[int]] = {}
    for row in rows:
        sums = domains.setdefault(row[3], [0, 0])
        sums[0] = sums[0] + row[5]
        sums[1] = sums[1] + row[4]
    return EvaluationResult(
        step=step,
        policy=policy,
        time=mtime / 1e9,
        tasks=len(rows),
        episodes=episodes,
        success_rate=successes / max(episodes, 1),
        low=low,
        high=high,
        reward_mean=sum(row[6] for row in rows) / max(episodes, 1),
        by_domain={name: right / max(count, 1) for name, (right, count) in sorted(domains.items())},
    )


def evaluated_tasks(connection: sqlite3.Connection, step: int, policy: str) -> list[EvaluatedTask]:
    rows = connection.execute(
        "SELECT step, policy, number, domain, task_index, episodes, successes, reward_sum / "
        "max(episodes, 1), frames,"
        " prompt FROM evaluated WHERE step = ? AND policy = ? ORDER BY source, number",
        (step, policy),
    )
    return [EvaluatedTask(*row) for row in rows]


def evaluated_task(
    connection: sqlite3.Connection, folder: Path, step: int, policy: str, number: int
) -> dict[str, Any]:
    row = connection.execute(
        "SELECT s.name, e.start, e.end FROM evaluated e JOIN sources s ON s.id = e.source"
        " WHERE e.step = ? AND e.policy = ? AND e.number = ?",
        (step, policy, number),
    ).fetchone()
    return evaluated_row(folder, *row) if row else {}
