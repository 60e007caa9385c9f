"""Collects the metrics that a reward hub reports every second."""

from __future__ import annotations

import time
from collections import defaultdict

from broker.contract import wire


class RewardhubMetrics:
    """Metrics: means over the groups since the last report, and counts since the start."""

    def __init__(self) -> None:
        self.groups = self.closed = self.handed_back = self.retries = 0
        self.cost = 0.0  # of judges, in the currency of their prices
        self._num_groups = self._num_trajectories = 0
        self._sums: dict[str, float] = defaultdict(float)
        self._seconds = 0.0
        self._since = time.monotonic()

    def add(self, group: wire.Group, seconds: float) -> None:
        """Add one finished group and its duration."""
        self.groups += 1
        self._num_groups += 1
        self._num_trajectories += len(group.trajectories)
        self._seconds += seconds
        for trajectory in group.trajectories:
            self._sums["reward/mean"] += trajectory.reward
            for name, value in trajectory.reward_parts.items():
                self._sums[f"reward_parts/{name}/mean"] += value

    def report(self) -> dict[str, float]:
        """Return the metrics, and reset the means."""
        now = time.monotonic()
        values = {name: total / self._num_trajectories for name, total in self._sums.items()}
        if self._num_groups:
            values["time/reward"] = self._seconds / self._num_groups
        values["perf/samples_per_s"] = self._num_trajectories / max(now - self._since, 1e-6)
        values["rewardhub/groups"] = self.groups
        values["rewardhub/cost"] = self.cost
        values["rewardhub/closed"] = self.closed
        values["rewardhub/handed_back"] = self.handed_back
        values["rewardhub/retries"] = self.retries
        self._sums.clear()
        self._num_groups = self._num_trajectories = 0
        self._seconds = 0.0
        self._since = now
        return values
