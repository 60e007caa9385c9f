"""Finds how many tasks ``rlearner eval`` measures."""

from __future__ import annotations

from typing import Any, Final

from broker.settings.registry import resolve

NUM_EVAL_TASKS: Final = "envhub.config:num_eval_tasks"  # the envhub makes the tasks, so it knows how many there are


def with_num_tasks(config: dict[str, Any]) -> dict[str, Any]:
    """Return a validated configuration with ``eval.tasks`` filled in, even if its run would not evaluate.

    Raises:
        ConfigError: if a domain has no held-out tasks, or fewer than requested.
    """
    return {**config, "eval": {**config["eval"], "tasks": resolve("num_eval_tasks", NUM_EVAL_TASKS, {})(config)}}
