"""Adds the scores that rewards give per turn to the rewards of the turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from broker.contract import wire
from broker.settings.config import RewardConfig
from rewardhub.rewards.base import Scored


def add_turn_scores(
    turn_rewards: Sequence[float],
    scores: Mapping[int, Scored],
    rewards: Sequence[RewardConfig],
    first: int = 0,
) -> list[float]:
    """Return the rewards of turns with the scores that rewards gave per turn.

    Args:
        scores: as in ``add_scores``.
        first: which turn of the episode is the first of these.
    """
    totals = list(turn_rewards)
    for r, scored in scores.items():
        if isinstance(scored.value, list):
            for index, number in enumerate(scored.value[first : first + len(totals)]):
                totals[index] += rewards[r].weight * number
    return totals


def with_rewards(turns: Sequence[wire.Turn], rewards: Sequence[float]) -> list[wire.Turn]:
    """Return the turns with these rewards."""
    return [replace(turn, reward=reward) for turn, reward in zip(turns, rewards, strict=True)]
