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
    if "observed" in sums:
        metrics["actor/echo_loss"] = sums["observed_loss"] / max(sums["observed"], 1.0)
    if "kl" in sums:
        metrics["actor/kl_loss"] = mean["kl"]
    if num_scored := sums.get("teacher_tokens", 0.0):
        metrics["teacher/kl"] = sums["teacher_kl"] / num_scored
        metrics["teacher/scored_ratio"] = num_scored / max(tokens, 1)
        if "teacher_loss" in sums:
            metrics["teacher/loss"] = sums["teacher_loss"] / num_scored
    return metrics | ratio_metrics(sums, tokens) | correction_metrics(sums, tokens)


def average_metrics(rows: Sequence[Mapping[str, float]], num_epochs: int) -> dict[str, float]:
    """Return the means of the metrics of several updates; counts are those of one pass.

    A metric that some updates lack, such as a teacher's, is the mean of the others.
    """
    means: dict[str, float] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if name in row]
        is_count = name.startswith("actor/num_") or name == "actor/skipped"
        means[name] = sum(values) / (num_epochs if is_count else len(values))
    return means
