"""The metrics that a hub reports every second."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from envhub.task import EpisodeResult

# weight of the lengths of a group after the next one
DECAY: Final = 0.99


class _RecentMean:
    """Mean of the values of recent groups."""

    def __init__(self) -> None:
        self._sum = self._count = 0.0

    def add(self, values: Sequence[int]) -> None:
        self._sum = self._sum * DECAY + sum(values)
        self._count = self._count * DECAY + len(values)

    @property
    def mean(self) -> float:
        return self._sum / self._count if self._count else 0.0


class HubMetrics:
    """Means over the episodes since the last report, and counts since the start."""

    def __init__(self) -> None:
        self.groups = self.closed = self.handed_back = self.failures = 0
        self._episodes = 0
        self._sums: dict[str, float] = defaultdict(float)
        self._finished_mean = _RecentMean()
        self._overall_mean = _RecentMean()
        self._since = time.monotonic()

    def add(self, result: EpisodeResult) -> None:
        """Add a finished episode."""
        trajectory = result.trajectory
        sums = self._sums
        self._episodes += 1
        sums["reward/mean"] += trajectory.reward
        sums["env/success_rate"] += trajectory.success
        sums["time/generate"] += result.generate_s
        sums["time/env_step"] += result.env_step_s
        for name, value in trajectory.metrics.items():
            sums[f"env/{name}"] += value

    def add_lengths(self, finished_lengths: Sequence[int], cut_lengths: Sequence[int]) -> None:
        """Add a finished group's lengths, and the expected ones of episodes that it cut off."""
        self._finished_mean.add(finished_lengths)
        self._overall_mean.add([*finished_lengths, *cut_lengths])

    def report(self) -> dict[str, float]:
        """Return the metrics, and start the means again."""
        now = time.monotonic()
        values = {name: total / self._episodes for name, total in self._sums.items()}
        values["perf/episodes_per_s"] = self._episodes / max(now - self._since, 1e-6)
        values["envhub/groups"] = self.groups
        values["envhub/closed"] = self.closed
        values["envhub/handed_back"] = self.handed_back
        values["envhub/failed_episodes"] = self.failures
        if self._overall_mean.mean:
            values["off_policy/length_bias"] = self._finished_mean.mean / self._overall_mean.mean
        self._sums.clear()
        self._episodes = 0
        self._since = now
        return values
