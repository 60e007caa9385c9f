"""Keeps groups with successes and failures. Yu et al., DAPO (arXiv 2503.14476)."""

from __future__ import annotations

from broker.contract import wire
from learner.algorithm.episodes import final_trajectories


def has_mixed_success(group: wire.Group) -> bool:
    """Return whether some, but not all episodes succeeded, without greedy baselines."""
    successes = [episode.success for episode in final_trajectories(group)]
    return 0 < sum(successes) < len(successes)
