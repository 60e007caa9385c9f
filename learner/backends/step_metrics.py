"""Turns the sums of an update into metrics by their published names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from learner.algorithm.aggregation import BatchCounts
from learner.algorithm.losses.ratios import correction_metrics, ratio_metrics
from learner.config import AlgorithmSection


def step_metrics(
    sums: Mapping[str, float], counts: BatchCounts, scale: float, algorithm: AlgorithmSection
) -> dict[str, float]:
    """Return the metrics of one update.

    Args:
        sums: over its tokens, as ``learner.backends.objective`` names them.
        counts: of tokens and rows.
        scale: denominator of its loss.
    """
    tokens = counts.tokens
    means = ("entropy", "ppo_kl", "clipped", "dual_clipped", "kl")
    mean = {name: sums.get(name, 0.0) / max(tokens, 1) for name in means}
    metrics = {
        "actor/pg_loss": sums.get("pg_loss", 0.0) / scale,
        "actor/entropy": mean["entropy"],
        "actor/ppo_kl": mean["ppo_kl"],
        "actor/pg_clipfrac": mean["clipped"],
        "actor/num_tokens": float(tokens),
        "actor/num_rows": float(counts.rows),
        "actor/num_input_tokens": sums.get("inputs", 0.0),
        "actor/num_padded_tokens": sums.get("padded", 0.0),
    }
    if algorithm.dual_clip is not None:
        metrics["actor/pg_clipfrac_lower"] = mean["dual_clipped"]
    if "kl" in sums:
        metrics["actor/kl_loss"] = mean["kl"]
    return metrics | ratio_metrics(sums, tokens) | correction_metrics(sums, tokens)


def average_metrics(rows: Sequence[Mapping[str, float]], num_epochs: int) -> dict[str, float]:
    """Return the means of the metrics of several updates; counts are those of one pass."""
    if not rows:
        return {}
    totals = {name: sum(row[name] for row in rows) for name in rows[0]}
    return {
        name: total
        / (num_epochs if name.startswith("actor/num_") or name == "actor/skipped" else len(rows))
        for name, total in totals.items()
    }
