"""Compute means over seeds, and intervals over maps and seeds, from the arms' results. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

RESAMPLES: Final = 2000
Results = Mapping[str, Sequence[Mapping[str, Any]]]  # name -> results of its seeds


def rate(found: Mapping[str, Any]) -> float:
    """Return the solved share of the held-out episodes of an arm."""
    return float(sum(found["solved"]) / (len(found["solved"]) * found["episodes_per_map"]))


def interval(results: Sequence[Mapping[str, Any]], rng: np.random.Generator) -> tuple[float, float]:
    """95 % bootstrap interval of the mean success: seeds are drawn again, and within each its maps.

    With one seed it says only what another draw of maps and actions would change, not another
    training.
    """
    rates: list[npt.NDArray[np.float64]] = [
        np.array(one["solved"], np.float64) / one["episodes_per_map"] for one in results
    ]
    means = np.empty(RESAMPLES)
    for index in range(RESAMPLES):
        seeds = rng.integers(0, len(rates), len(rates))
        means[index] = np.mean(
            [
                rates[seed][rng.integers(0, len(rates[seed]), len(rates[seed]))].mean()
                for seed in seeds
            ]
        )
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def algorithm_rows(starts: Results, algorithms: Results) -> dict[str, dict[str, float]]:
    """Start, end, ratio and interval of each algorithm; ``starts`` are the warm starts that each
    began with.
    """
    rng = np.random.default_rng(0)
    rows = {}
    for name, results in algorithms.items():
        first = float(np.mean([rate(one) for one in starts[name]]))
        end = float(np.mean([rate(one) for one in results]))
        low, high = interval(results, rng)
        rows[name] = {
            "start": round(first, 4),
            "end": round(end, 4),
            "ratio": round(end / first, 3),
        }
        rows[name] |= {"low": round(low, 4), "high": round(high, 4), "seeds": len(results)}
        rows[name] |= {"seconds": round(float(np.mean([one["cpu_s"] for one in results])), 1)}
    return rows


def staleness_rows(results: Mapping[str, Results]) -> dict[str, dict[str, dict[str, float]]]:
    """Return success with its interval, and seconds, by loss and max_staleness."""
    rng = np.random.default_rng(1)
    rows: dict[str, dict[str, dict[str, float]]] = {}
    for name, by_late in results.items():
        rows[name] = {}
        for late, found in sorted(by_late.items(), key=lambda item: int(item[0])):
            low, high = interval(found, rng)
            row = {
                "success": round(float(np.mean([rate(one) for one in found])), 4),
                "low": round(low, 4),
            }
            row |= {"high": round(high, 4), "seeds": len(found)}
            rows[name][late] = row | {
                "seconds": round(float(np.mean([one["cpu_s"] for one in found])), 1)
            }
    return rows


def loss_at(
    rows: Mapping[str, Mapping[str, Mapping[str, float]]], names: Sequence[str], late: str
) -> float | None:
    """How much success the named losses together have lost at a lateness against none; None where
    one is missing.
    """
    if not names or any(key not in rows.get(name, {}) for name in names for key in ("0", late)):
        return None
    return round(
        float(
            np.mean([rows[name]["0"]["success"] - rows[name][late]["success"] for name in names])
        ),
        4,
    )
