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


def shape(groups: Sequence[wire.Group], algorithm: AlgorithmSection) -> list[wire.Group]:
    """Return the groups with shaped rewards, normalized over these groups.

    Greedy baselines are shaped like the rest, but do not count in means and standard deviations.
    """
    shaped = [
        _replace(group, [_penalise(one, algorithm) for one in group.trajectories])
        for group in groups
    ]
    normalization = algorithm.reward_normalization
    if normalization.norm_mean_type or normalization.norm_std_type:
        shaped = _normalise(shaped, normalization)
    if (limit := algorithm.reward_clip) is None:
        return shaped
    return [
        _replace(
            group,
            [
                replace(one, reward=min(max(one.reward, -limit), limit))
                for one in group.trajectories
            ],
        )
        for group in shaped
    ]


def needs_batch(normalization: RewardNormalization) -> bool:
    """Return whether normalizing a group's rewards needs the whole batch."""
    types = {normalization.norm_mean_type, normalization.norm_std_type} - {None}
    return bool(types) and not (normalization.grouping == "traj_group_id" and types == {"group"})


def overlong_penalty(length: int, max_length: int, buffer: int, factor: float = 1.0) -> float:
    """Return ``min(-(length - (max_length - buffer)) / buffer * factor, 0)``, at least ``-factor``
    (arXiv 2503.14476).

    Args:
        length: sampled tokens.
        max_length: tokens at which the penalty is full.
        buffer: tokens before that over which it grows.
    """
    return max(min(-(length - (max_length - buffer)) / buffer * factor, 0.0), -factor)


def normalise(
    rewards: FloatArray,
    keys: Sequence[object],
    mean_type: str | None,
    std_type: str | None,
    counted: Sequence[bool] | None = None,
) -> tuple[FloatArray, FloatArray]:
    """Return shift and scale of each reward, (B,) each: normalized rewards are ``(R - shift) /
    scale``.

    Args:
        rewards: (B,), one value per sample.
        keys: rewards of the same key form a group.
        mean_type: shift by the mean of the group, the batch, or None for 0.
        std_type: scale by the standard deviation (ddof 1) plus 1e-6, likewise; 1 for equal rewards.
        counted: False excludes a reward from means and standard deviations.
    """
    kept = np.ones(len(rewards), bool) if counted is None else np.array(counted, bool)
    numbers = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    names = np.array([numbers[key] for key in keys], dtype=np.int64)
    shift = np.zeros_like(rewards)
    scale = np.ones_like(rewards)
    for name in range(len(numbers)):
        members = names == name
        for kind, target in ((mean_type, shift), (std_type, scale)):
            pool = rewards[kept & members] if kind == "group" else rewards[kept]
            if kind is None or not len(pool):
                continue
            target[members] = _mean(pool) if target is shift else _spread(pool)
    return shift, scale


def _mean(values: FloatArray) -> float:
    # equal rewards give exactly 0
    return float(values[0] if values.min() == values.max() else values.mean())


def _spread(values: FloatArray) -> float:
    return (
        float(values.std(ddof=1)) + EPS if len(values) > 1 and values.min() != values.max() else 1.0
    )


def minus_kl(trajectory: wire.Trajectory, kl: FloatArray) -> wire.Trajectory:
    """Subtract a penalty per token from a trajectory's reward and from the turns of the tokens.

    Args:
        kl: (T,) of the sampled tokens, in the reward's unit.
    """
    at = np.zeros(len(trajectory.loss_mask.array()))
    at[sampled_positions(trajectory)] = kl
    turns = [
        replace(turn, reward=turn.reward - float(at[turn.start : turn.end].sum()))
        for turn in trajectory.turns
    ]
    return replace(trajectory, reward=trajectory.reward - float(kl.sum()), turns=turns)


def is_truncated(trajectory: wire.Trajectory) -> bool:
    """Return whether the trajectory, or its last turn, was truncated."""
    return trajectory.end == "length" or (
        bool(trajectory.turns) and trajectory.turns[-1].finish_reason == "length"
    )


def _penalise(trajectory: wire.Trajectory, algorithm: AlgorithmSection) -> wire.Trajectory:
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
        limits = (algorithm.overlong_length, algorithm.overlong_buffer, algorithm.overlong_factor)
        reward += overlong_penalty(int(trajectory.loss_mask.array().sum()), *limits)
    return replace(trajectory, reward=reward, turns=turns)


def _normalise(groups: Sequence[wire.Group], section: RewardNormalization) -> list[wire.Group]:
    pairs = [(group, trajectory) for group in groups for trajectory in group.trajectories]
    shift, scale = normalise(
        np.array([trajectory.reward for _, trajectory in pairs], dtype=np.float64),
        [_key(group, trajectory, section.grouping) for group, trajectory in pairs],
        section.norm_mean_type,
        section.norm_std_type,
        [not trajectory.greedy for _, trajectory in pairs],
    )
    scaled = iter(
        [
            _scale(one, float(a), float(b))
            for (_, one), a, b in zip(pairs, shift, scale, strict=True)
        ]
    )
    return [_replace(group, [next(scaled) for _ in group.trajectories]) for group in groups]


def _key(group: wire.Group, trajectory: wire.Trajectory, grouping: str) -> object:
    """Return the key of a trajectory's group; ``state`` is the first observation acted on, or
    without it the ticket.
    """
    if grouping == "batch":
        return 0
    if grouping == "inductive":
        return group.domain
    anchor = trajectory.turns[0].anchor if trajectory.turns else ""
    return (group.domain, anchor) if grouping == "state" and anchor else group.ticket


def _scale(trajectory: wire.Trajectory, shift: float, scale: float) -> wire.Trajectory:
    turns = [replace(turn, reward=turn.reward / scale) for turn in trajectory.turns]
    return replace(trajectory, reward=(trajectory.reward - shift) / scale, turns=turns)


def _replace(group: wire.Group, trajectories: list[wire.Trajectory]) -> wire.Group:
    return replace(group, trajectories=trajectories)
