"""Decides by their share of successful episodes which groups are kept, and when that is certain
early. Pure.

Learner and hubs must agree on it to the last bit, so both use this.
"""

from __future__ import annotations


def is_within(num_solved: int, num_episodes: int, low: float, high: float) -> bool:
    """Return whether the share of solved episodes is from ``low`` to ``high``."""
    return low <= num_solved / num_episodes <= high


def never_within(num_solved: int, num_known: int, num_open: int, low: float, high: float) -> bool:
    """Return whether no completion of a group has a share of solved episodes from ``low`` to
    ``high``.

    A completion has all known episodes and any number of the open ones, each solved or not. The
    share is lowest if all open ones join unsolved, and highest if all join solved.

    Args:
        num_solved: of the known episodes.
        num_known: episodes of the group whose success is final.
        num_open: episodes that may still join it.
    """
    if not num_known:
        return False  # a group of any of them is possible
    total = num_known + num_open
    return num_solved / total > high or (num_solved + num_open) / total < low
