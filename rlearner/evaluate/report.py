"""Formats the result of an evaluation, as one JSON object and as text. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from learner.evaluation import pass_at_k
from learner.evaluation.evaluation import Evaluation


def result_of(
    evaluation: Evaluation, model: str, seconds: float, files: Mapping[str, str]
) -> dict[str, Any]:
    """Return success_rate with its 95 % interval, avg@k and pass@k, mean reward, and the same by
    domain.

    Tasks whose ticket was closed are only counted, by reason, in ``closed``. ``files`` of the
    result holds those whose rows were all measured, by domain.
    """
    return {
        "model": model,
        **_measure_domain(evaluation, None),
        "closed": dict(sorted(evaluation.closed.items())),
        "domains": {name: _measure_domain(evaluation, name) for name in evaluation.domains},
        "files": dict(files),
        "seconds": round(seconds, 1),
    }


def _measure_domain(evaluation: Evaluation, domain: str | None) -> dict[str, Any]:
    tries = evaluation.tries(domain)
    rewards = evaluation.rewards(domain)
    low, high = pass_at_k.success_interval(tries)
    flat = [success for task in tries for success in task]
    return {
        "tasks": len(tries),
        "episodes": len(flat),
        "success_rate": sum(flat) / len(flat),
        "success_interval": [low, high],
        "reward_mean": sum(rewards) / len(rewards),
        **pass_at_k.pass_at_k_metrics(tries),
    }


def format_report(result: dict[str, Any], folder: Path) -> str:
    """Return the result as text."""
    lines = [
        f"{result['model']}: {result['tasks']} tasks, {result['episodes']} episodes "
        f"in {result['seconds']:.0f} s",
        _format_domain("all", result),
    ]
    if len(result["domains"]) > 1:
        lines += [_format_domain(name, values) for name, values in result["domains"].items()]
    lines += [f"  {name}: all tasks of {file}" for name, file in result["files"].items()]
    if result["closed"]:
        lines.append(
            "not measured: "
            + ", ".join(f"{count} {reason}" for reason, count in result["closed"].items())
        )
    return "\n".join(
        [*lines, f"episodes: {folder / 'evals'}", f"result:   {folder / 'result.json'}"]
    )


def _format_domain(name: str, values: dict[str, Any]) -> str:
    low, high = values["success_interval"]
    rates = "".join(
        f"  {key} {value:.3f}" for key, value in values.items() if key.startswith(("avg@", "pass@"))
    )
    success = f"success {values['success_rate']:.3f} (95 % {low:.3f} to {high:.3f})"
    return f"  {name}: {success}  reward {values['reward_mean']:.3f}{rates}"
