"""Derives interval metrics from an engine's cumulative counters (pure)."""

from __future__ import annotations

from typing import Final

from rollout.engines.base import EngineStats

SPEED_HALVES_S: Final = 300.0  # half-life of ``speed``, in seconds of work


class IntervalMetrics:
    """Differences between two readings of an engine's counters.

    Args:
        now: seconds on any monotonic clock.

    Attributes:
        speed: recent peak of generated tokens per second, initially 0; halves in five minutes of
            work.
        idle_ratio: share of the last interval without work, -1 before the first reading.
    """

    def __init__(self, now: float) -> None:
        self._at = now
        self._before = EngineStats()
        self._requests = 0
        self._request_s = 0.0
        self.speed = 0.0
        self.idle_ratio = -1.0

    def answered(self, seconds: float) -> None:
        """Record a request that took this long, queueing included."""
        self._requests += 1
        self._request_s += seconds

    def read(self, now: float, stats: EngineStats) -> dict[str, float]:
        """Return the metrics since the last reading."""
        seconds = max(now - self._at, 1e-9)
        last_stats = self._before
        self._before = stats
        self._at = now
        context = stats.prefill_tokens - last_stats.prefill_tokens
        hits = stats.prefix_hit_tokens - last_stats.prefix_hit_tokens
        busy_s = min(seconds, max(0.0, stats.busy_s - last_stats.busy_s))
        tokens_per_s = (stats.generated_tokens - last_stats.generated_tokens) / seconds
        self.idle_ratio = 1.0 - busy_s / seconds
        self.speed = max(tokens_per_s, self.speed * 0.5 ** (busy_s / SPEED_HALVES_S))
        values = {
            "rollouter/idle_ratio": self.idle_ratio,
            "perf/tokens_per_s": tokens_per_s,
            "rollout/running": float(stats.running),
            "rollout/waiting": float(stats.waiting),
            "rollout/slots": float(stats.slots),
            "rollout/requests_per_s": self._requests / seconds,
            "rollout/prefix_hit_ratio": hits / (hits + context) if hits + context else 0.0,
            "time/generate": self._request_s / self._requests if self._requests else 0.0,
            "time/pause": stats.pause_s - last_stats.pause_s,
        }
        for reason, count in stats.finished.items():
            values[f"rollout/finished/{reason}"] = float(count)
        self._requests = 0
        self._request_s = 0.0
        return values
