"""Keeps groups in which some episodes succeeded and some did not. Yu et al., DAPO (arXiv
2503.14476).
"""

from __future__ import annotations

from broker.contract import wire
from learner.algorithm.episodes import episodes


def wanted(group: wire.Group) -> bool:
    """Return whether some, but not all of the group's episodes succeeded, without greedy baselines."""
    found = [episode.success for episode in episodes(group)]
    return 0 < sum(found) < len(found)
