"""Medians of interleaved pairs and their intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Bounds that hold the median of the population with at least this probability, whatever the
    distribution.

    The k-th smallest and k-th largest of n values miss it with probability 2 * P(Binomial(n, 1/2) <
    k). With too few values for any k the extremes are given.
    """
    ordered = sorted(values)
    n = len(ordered)
    k = 1
    below = 0.0
    for candidate in range(1, n // 2 + 1):
        below += math.comb(n, candidate - 1) / 2**n
        if 2 * below > 1 - confidence:
            break
        k = candidate
    return ordered[k - 1], ordered[n - k]


def by_second(rates: Sequence[float], every: int) -> list[float]:
    """Return what the first second of each period lacks compared with the others, as a share of the
    whole period.
    """
    groups = [rates[at : at + every] for at in range(0, len(rates) - every + 1, every)]
    return [
        (statistics.mean(group[1:]) - group[0]) / (every * statistics.mean(group[1:]))
        for group in groups
        if any(group[1:])
    ]
