"""The metrics that a hub reports every second."""

from __future__ import annotations

import time
from collections import defaultdict

from envhub.task import EpisodeResult


class HubMetrics:
    """Means over the episodes since the last report, and counts since the start."""

    def __init__(self) -> None:
        self.groups = self.closed = self.handed_back = self.failures = 0
        self._episodes = 0
        self._sums: dict[str, float] = defaultdict(float)
        self._since = time.monotonic()

    def add(self, played: EpisodeResult) -> None:
        """Add a finished episode."""
        trajectory, sums = played.trajectory, self._sums
        self._episodes += 1
        sums["reward/mean"] += trajectory.reward
        sums["env/success_rate"] += trajectory.success
        sums["time/generate"] += played.generate_s
        sums["time/env_step"] += played.env_step_s
        for name, value in trajectory.metrics.items():
            sums[f"env/{name}"] += value

    def report(self) -> dict[str, float]:
        """Return the metrics, and start the means again."""
        now = time.monotonic()
        values = {name: total / self._episodes for name, total in self._sums.items()}
        values["perf/episodes_per_s"] = self._episodes / max(now - self._since, 1e-6)
        values["envhub/groups"] = self.groups
        values["envhub/closed"] = self.closed
        values["envhub/handed_back"] = self.handed_back
        values["envhub/failed_episodes"] = self.failures
        self._sums.clear()
        self._episodes, self._since = 0, now
        return values
