"""Shapes rewards before the estimator: penalties, then normalization, then clipping. Pure.

Turn rewards follow the trajectory's: penalties for a turn are subtracted from that turn, a scale
applies to all, and the rest of the total's change comes after the last turn, where the estimators
expect it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from msgspec.structs import replace

from broker.contract import wire
from learner.algorithm.advantages.base import FloatArray, sampled_positions
from learner.config import AlgorithmSection, RewardNormalization

EPS: Final = 1e-6


def shape_rewards(groups: Sequence[wire.Group], algorithm: AlgorithmSection) -> list[wire.Group]:
    """Return the groups with shaped rewards, normalized over these groups.

    Greedy baselines are shaped like the rest, but do not count in means and standard deviations.
    """
    shaped = [
        _with_trajectories(
            group, [_subtract_penalties(trajectory, algorithm) for trajectory in group.trajectories]
        )
        for group in groups
    ]
    normalization = algorithm.reward_normalization
    if normalization.norm_mean_type or normalization.norm_std_type:
        shaped = _normalize_groups(shaped, normalization)
    if (limit := algorithm.reward_clip) is None:
        return shaped
    return [
        _with_trajectories(
            group,
            [
                replace(trajectory, reward=min(max(trajectory.reward, -limit), limit))
                for trajectory in group.trajectories
            ],
        )
        for group in shaped
    ]


def needs_batch(normalization: RewardNormalization) -> bool:
    """Return whether normalizing a group's rewards needs the whole batch."""
    types = {normalization.norm_mean_type, normalization.norm_std_type} - {None}
    return bool(types) and not (normalization.grouping == "traj_group_id" and types == {"group"})


def overlong_penalty(length: int, max_length: int, buffer: int, factor: float = 1.0) -> float:
    """Return a penalty that grows from 0 to ``-factor`` over ``buffer`` tokens (arXiv 2503.14476).

    Args:
        length: sampled tokens.
        max_length: tokens at which the penalty is full.
        buffer: tokens before that over which it grows.
    """
    return max(min(-(length - (max_length - buffer)) / buffer * factor, 0.0), -factor)


def normalize_rewards(
    rewards: FloatArray,
    keys: Sequence[object],
    mean_type: str | None,
    std_type: str | None,
    is_counted: Sequence[bool] | None = None,
) -> tuple[FloatArray, FloatArray]:
    """Return shift and scale, (B,) each; normalized rewards are ``(R - shift) / scale``.

    Args:
        rewards: (B,), one value per sample.
        keys: rewards of the same key form a group.
        mean_type: shift by the mean of the group, the batch, or None for 0.
        std_type: scale by the standard deviation (ddof 1) plus 1e-6, likewise; 1 for equal rewards.
        is_counted: False excludes a reward from means and standard deviations.
    """
    included = np.ones(len(rewards), bool) if is_counted is None else np.array(is_counted, bool)
    numbers = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    group_ids = np.array([numbers[key] for key in keys], dtype=np.int64)
    shift = np.zeros_like(rewards)
    scale = np.ones_like(rewards)
    for group_id in range(len(numbers)):
        members = group_ids == group_id
        for scope, target in ((mean_type, shift), (std_type, scale)):
            pool = rewards[included & members] if scope == "group" else rewards[included]
            if scope is None or not len(pool):
                continue
            target[members] = _exact_mean(pool) if target is shift else _deviation(pool)
    return shift, scale


def _exact_mean(values: FloatArray) -> float:
    # The mean of equal rewards, rounded, may differ from them: their advantage must be exactly 0.
    return float(values[0] if values.min() == values.max() else values.mean())


def _deviation(values: FloatArray) -> float:
    if len(values) < 2 or values.min() == values.max():
        return 1.0
    return float(values.std(ddof=1)) + EPS


def minus_kl(trajectory: wire.Trajectory, kl: FloatArray) -> wire.Trajectory:
    """Subtract a penalty per token from a trajectory's reward and from the turns of the tokens.

    Args:
        kl: (T,) of the sampled tokens, in the reward's unit.
    """
    penalties = np.zeros(len(trajectory.loss_mask.array()))
    penalties[sampled_positions(trajectory)] = kl
    turns = [
        replace(turn, reward=turn.reward - float(penalties[turn.start : turn.end].sum()))
        for turn in trajectory.turns
    ]
    return replace(trajectory, reward=trajectory.reward - float(kl.sum()), turns=turns)


def is_truncated(trajectory: wire.Trajectory) -> bool:
    """Return whether the trajectory, or its last turn, was truncated."""
    return trajectory.end == "length" or (
        bool(trajectory.turns) and trajectory.turns[-1].finish_reason == "length"
    )


def _subtract_penalties(
    trajectory: wire.Trajectory, algorithm: AlgorithmSection
) -> wire.Trajectory:
    reward = trajectory.reward
    turns = trajectory.turns
    if algorithm.format_penalty:
        costs = [0.0 if turn.valid else algorithm.format_penalty for turn in turns]
        turns = [
            replace(turn, reward=turn.reward - cost)
            for turn, cost in zip(turns, costs, strict=True)
        ]
        reward -= sum(costs)
    if algorithm.overlong_buffer and algorithm.overlong_length:
        reward += overlong_penalty(
            int(trajectory.loss_mask.array().sum()),
            algorithm.overlong_length,
            algorithm.overlong_buffer,
            algorithm.overlong_factor,
        )
    return replace(trajectory, reward=reward, turns=turns)


def _normalize_groups(
    groups: Sequence[wire.Group], section: RewardNormalization
) -> list[wire.Group]:
    pairs = [(group, trajectory) for group in groups for trajectory in group.trajectories]
    shift, scale = normalize_rewards(
        np.array([trajectory.reward for _, trajectory in pairs], dtype=np.float64),
        [_group_key(group, trajectory, section.grouping) for group, trajectory in pairs],
        mean_type=section.norm_mean_type,
        std_type=section.norm_std_type,
        is_counted=[not trajectory.greedy for _, trajectory in pairs],
    )
    scaled = iter(
        [
            _scale_rewards(trajectory, float(offset), float(divisor))
            for (_, trajectory), offset, divisor in zip(pairs, shift, scale, strict=True)
        ]
    )
    return [
        _with_trajectories(group, [next(scaled) for _ in group.trajectories]) for group in groups
    ]


def _group_key(group: wire.Group, trajectory: wire.Trajectory, grouping: str) -> object:
    """Return the key of a trajectory's group; ``state``: its first observation, or the ticket."""
    if grouping == "batch":
        return 0
    if grouping == "inductive":
        return group.domain
    anchor = trajectory.turns[0].anchor if trajectory.turns else ""
    return (group.domain, anchor) if grouping == "state" and anchor else group.ticket


def _scale_rewards(trajectory: wire.Trajectory, shift: float, scale: float) -> wire.Trajectory:
    turns = [replace(turn, reward=turn.reward / scale) for turn in trajectory.turns]
    return replace(trajectory, reward=(trajectory.reward - shift) / scale, turns=turns)


def _with_trajectories(group: wire.Group, trajectories: list[wire.Trajectory]) -> wire.Group:
    return replace(group, trajectories=trajectories)
