"""Metrics of the last interval from an engine's growing counters: pure."""

from __future__ import annotations

from rollout.engines.base import Stats


class Meter:
    """Differences between two looks at an engine.

    Args:
        now: seconds on any monotonic clock.
    """

    def __init__(self, now: float) -> None:
        self._at = now
        self._before = Stats()
        self._requests = 0
        self._request_s = 0.0

    def answered(self, seconds: float) -> None:
        """A request took this long, waiting included."""
        self._requests += 1
        self._request_s += seconds

    def read(self, now: float, stats: Stats) -> dict[str, float]:
        """What happened since the last reading."""
        seconds = max(now - self._at, 1e-9)
        before, self._before, self._at = self._before, stats, now
        context = stats.prefill_tokens - before.prefill_tokens
        hits = stats.prefix_hit_tokens - before.prefix_hit_tokens
        values = {
            "rollouter/idle_ratio": min(1.0, max(0.0, 1.0 - (stats.busy_s - before.busy_s) / seconds)),
            "perf/tokens_per_s": (stats.generated_tokens - before.generated_tokens) / seconds,
            "rollout/running": float(stats.running),
            "rollout/waiting": float(stats.waiting),
            "rollout/slots": float(stats.slots),
            "rollout/requests_per_s": self._requests / seconds,
            "rollout/prefix_hit_ratio": hits / (hits + context) if hits + context else 0.0,
            "time/generate": self._request_s / self._requests if self._requests else 0.0,
            "time/pause": stats.pause_s - before.pause_s,
        }
        for reason, count in stats.finished.items():
            values[f"rollout/finished/{reason}"] = float(count)
        self._requests, self._request_s = 0, 0.0
        return values
