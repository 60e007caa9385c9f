"""The result of ``rlearner eval``: rates by domain, and every task with its tries."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rlearner.console.components import Grid, tag
from rlearner.console.index.answers import EvaluatedTask, EvaluationResult
from rlearner.console.pages.frame import ask
from rlearner.console.state import ConsoleRun
from rlearner.ops.run_kinds import RESULT

RATES: Final = ("avg@", "pass@")
TASKS_SHOWN: Final = 500
TASK_COLUMNS: Final[list[dict[str, Any]]] = [
    {"key": "task", "title": "task", "n": True},
    {"key": "domain", "title": "domain"},
    {"key": "solved", "title": "solved", "n": True},
    {"key": "reward", "title": "reward", "n": True},
    {"key": "prompt", "title": "prompt", "wrap": True},
]


async def show_evaluation(run: ConsoleRun, results: list[EvaluationResult]) -> None:
    """Build the tables of an evaluation's folder."""
    result = await asyncio.to_thread(read_result, run.folder)
    with tag("section", classes="panel"):
        tag("h2", "Result")
        columns, rows = result_table(result)
        Grid("result", columns, rows, empty="no result")
    tasks: list[EvaluatedTask] = []
    if results:
        newest = results[-1]
        tasks = await ask(lambda: run.queries.evaluated_tasks(newest.step, newest.policy)) or []
    with tag("section", classes="panel"):
        tag("h2", f"Tasks: {len(tasks):,}")
        shown = f"the first {TASKS_SHOWN} are shown; all are in {run.folder / 'evals'}"
        if len(tasks) > TASKS_SHOWN:
            tag("p", shown, "dim")
        Grid("tasks", TASK_COLUMNS, task_rows(tasks[:TASKS_SHOWN]), empty="no task was measured")


def read_result(folder: Path) -> dict[str, Any]:
    """Return the result in an evaluation's folder, empty if it cannot be read."""
    try:
        result = json.loads((folder / RESULT).read_bytes())
    except (OSError, ValueError):
        return {}
    return result if isinstance(result, dict) else {}


def result_table(result: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return columns and rows: all tasks, then each domain if there are several."""
    parts = {"all": result} if "success_rate" in result else {}
    domains = result.get("domains")
    if isinstance(domains, dict) and (len(domains) > 1 or not parts):
        parts |= domains
    rates = [name for name in result if name.startswith(RATES)]
    titles = {
        "success_rate": "success",
        "interval": "95 % interval",
        **{name: name for name in rates},
        "reward_mean": "reward",
        "tasks": "tasks",
        "episodes": "episodes",
    }
    columns: list[dict[str, Any]] = [{"key": "part", "title": "domain"}]
    columns += [{"key": key, "title": title, "n": True} for key, title in titles.items()]
    rows = []
    for name, values in parts.items():
        low, high = values.get("success_interval", (0.0, 1.0))
        row = {key: values.get(key) for key in titles}
        rows.append({"key": name, "part": name} | row | {"interval": f"{low:.3f} – {high:.3f}"})
    return columns, rows


def task_rows(tasks: list[EvaluatedTask]) -> list[dict[str, Any]]:
    """Return the table of the tasks, in the order of their file."""
    return [
        {
            "key": str(task.number),
            "task": task.task_index,
            "domain": task.domain,
            "solved": f"{task.successes}/{task.episodes}",
            "solved_sort": task.successes / max(task.episodes, 1),
            "reward": task.reward_mean,
            "prompt": task.prompt,
        }
        for task in tasks
    ]


def evaluation_series(results: list[EvaluationResult]) -> list[dict[str, Any]]:
    """Return a curve of each policy, and of each of its domains if there are several."""
    rows: dict[str, dict[str, Any]] = {}
    for result in results:
        line = rows.setdefault(
            result.policy,
            {"name": result.policy, "x": [], "y": [], "low": [], "high": [], "dots": True},
        )
        for name, value in (
            ("x", result.step),
            ("y", result.success_rate),
            ("low", result.low),
            ("high", result.high),
        ):
            line[name].append(value)
        # The curve of an only domain would hide the policy's.
        for domain, rate in result.by_domain.items() if len(result.by_domain) > 1 else ():
            label = f"{result.policy}, {domain}"
            curve = rows.setdefault(label, {"name": label, "x": [], "y": [], "dots": True})
            curve["x"].append(result.step)
            curve["y"].append(rate)
    return list(rows.values())
