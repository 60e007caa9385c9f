"""Group-in-group policy optimization: compares episodes, and steps from one state.

Feng et al. (arXiv 2505.10978).
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher

import numpy as np

from broker.contract import wire
from broker.errors import ConfigError
from learner.algorithm.advantages import grpo
from learner.algorithm.advantages.base import FloatArray, discounted_returns
from learner.algorithm.traits import EstimatorTraits, declares
from learner.config import AlgorithmSection


def step_groups(anchors: Sequence[str], similarity: float = 1.0) -> list[int]:
    """Return the step group of each step, numbered in order of appearance.

    Args:
        anchors: observations acted on; an empty one equals no other.
        similarity: 1 for identical anchors only; below, a step joins the first group whose first
            anchor is at least as similar (``difflib`` ratio).
    """
    heads: list[str] = []
    groups: list[int] = []
    for anchor in anchors:
        index = next(
            (
                i
                for i, head in enumerate(heads)
                if anchor and _is_same_state(head, anchor, similarity)
            ),
            len(heads),
        )
        if index == len(heads):
            heads.append(anchor)
        groups.append(index)
    return groups


def _is_same_state(head: str, anchor: str, similarity: float) -> bool:
    return head == anchor or (
        similarity < 1 and bool(head) and SequenceMatcher(None, head, anchor).ratio() >= similarity
    )


def step_advantages(
    returns: FloatArray, groups: Sequence[int], *, norm_std: bool = True
) -> FloatArray:
    """Return returns-to-go normalized in each step group like rewards in GRPO; 0 for a singleton.

    Args:
        returns: (num_steps,) over all episodes of one task's group.
        groups: from ``step_groups``.

    Returns:
        (num_steps,)
    """
    group_ids = np.array(groups, dtype=np.int64)
    values = np.zeros_like(returns)
    for group in np.unique(group_ids):
        values[group_ids == group] = grpo.group_advantages(
            returns[group_ids == group], norm_std=norm_std
        )
    return values


@declares(EstimatorTraits(compares_group=True, counts_episodes=True, compares_steps=True))
def estimate(
    trajectories: Sequence[wire.Trajectory], algorithm: AlgorithmSection
) -> list[FloatArray]:
    """Return ``A_episode + step_advantage_w * A_step`` on the tokens of each step.

    A step is a turn; ``gamma`` discounts per step. Samples may be step-independent (trajectories of
    one turn that share their episode's number, the last of which has the episode's total reward) or
    whole conversations; an episode counts once in A_episode, a step once in A_step.

    Raises:
        ConfigError: if no step has an anchor to compare.
    """
    steps = [
        (row, turn) for row, trajectory in enumerate(trajectories) for turn in trajectory.turns
    ]
    if steps and not any(turn.anchor for _, turn in steps):
        allowed = (
            "domains.DOMAIN.anchors observation, or an environment that gives anchors: "
            "the states of this one cannot be compared"
        )
        raise ConfigError("algorithm.adv_estimator", "gigpo", allowed)
    numbers = sorted({trajectory.episode for trajectory in trajectories})
    # The last trajectory of an episode has its total reward.
    totals = {trajectory.episode: trajectory.reward for trajectory in trajectories}
    normalized = grpo.group_advantages(
        np.array([totals[n] for n in numbers]), norm_std=algorithm.norm_std
    )
    episode_advantages = dict(zip(numbers, normalized, strict=True))
    returns = np.zeros(len(steps))
    for number in numbers:
        indices = [i for i, (row, _) in enumerate(steps) if trajectories[row].episode == number]
        rewards = np.array([steps[i][1].reward for i in indices])
        if len(indices):
            rewards[-1] += totals[number] - rewards.sum()
            returns[indices] = discounted_returns(rewards, algorithm.gamma)
    groups = step_groups([turn.anchor for _, turn in steps], algorithm.anchor_similarity)
    relative_values = step_advantages(returns, groups, norm_std=algorithm.norm_std)
    advantages = [np.zeros(len(trajectory.loss_mask.array())) for trajectory in trajectories]
    for (row, turn), value in zip(steps, relative_values, strict=True):
        advantages[row][turn.start : turn.end] = (
            episode_advantages[trajectories[row].episode] + algorithm.step_advantage_w * value
        )
    return [
        values * trajectory.loss_mask.array()
        for values, trajectory in zip(advantages, trajectories, strict=True)
    ]
