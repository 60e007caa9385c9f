"""Groups in which some episodes succeeded and some did not, whatever their rewards. Yu et al., DAPO (arXiv 2503.14476)."""

from __future__ import annotations

from broker.contract import wire
from learner.algorithm.episodes import episodes


def wanted(group: wire.Group) -> bool:
    """Whether between none and all of the group's episodes succeeded, greedy baselines aside."""
    found = [episode.success for episode in episodes(group)]
    return 0 < sum(found) < len(found)
