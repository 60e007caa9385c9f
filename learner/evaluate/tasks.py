"""How many tasks an evaluation measures: never one of them twice, which would count as another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from broker.errors import ConfigError
from broker.registry import resolve

HELD_OUT: Final = "envhub.config:held_out"  # who makes the tasks knows how many there are


def fitted(config: dict[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with as many tasks as every domain has, where ``eval.tasks`` was left at its default.

    Args:
        config: validated.
        asked: the same before defaults were filled in.

    Raises:
        ConfigError: a domain has no held-out tasks, or fewer than were asked for.
    """
    counts: dict[str, int] = resolve("held_out", HELD_OUT, {})(config)
    wanted, is_set = config["eval"]["tasks"], "tasks" in (asked.get("eval") or {})
    for name, there in counts.items():
        if not there:
            raise ConfigError("eval.tasks", wanted, f"domain {name} has no held-out tasks")
        if is_set and wanted > there:
            raise ConfigError("eval.tasks", wanted, f"at most {there}, the held-out tasks of domain {name}")
    return {**config, "eval": {**config["eval"], "tasks": min([wanted, *counts.values()])}}
