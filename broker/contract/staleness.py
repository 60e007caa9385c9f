"""Decides which tokens are too old to be trained on. Pure.

Learner, hubs and audit must agree on it, so all of them use this.
"""

from __future__ import annotations


def is_late(oldest_version: int, version: int, max_staleness: int) -> bool:
    """Return whether a group is late for the step that trains a policy version.

    A token may lag ``max_staleness`` versions behind, so the group is late from the version on that
    is newer than its oldest token by more than that. Once late, it is late for all later steps.

    Args:
        oldest_version: oldest policy version that sampled a token of the group.
        version: policy version that the step trains, which is the number of completed steps.
        max_staleness: ``train.max_staleness``, at least 0.
    """
    return version - oldest_version > max_staleness


def due_step(oldest_version: int, max_staleness: int) -> int:
    """Return the last version for which a group is not late, with the arguments of ``is_late``."""
    return oldest_version + max_staleness
