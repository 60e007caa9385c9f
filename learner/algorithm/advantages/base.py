"""What every estimator is: a pure function of one group's trajectories, or of a whole step's rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from broker.contract import wire
from learner.config import AlgorithmSection

FloatArray = npt.NDArray[np.float64]
F = TypeVar("F", bound=Callable[..., Any])


class Estimator(Protocol):
    """``(trajectories, algorithm)`` to one array of shape (n,) per trajectory: each token's advantage, 0 where the mask is 0."""

    def __call__(self, trajectories: Sequence[wire.Trajectory], algorithm: AlgorithmSection) -> list[FloatArray]: ...


@dataclass(frozen=True, eq=False)
class Row:
    """One trajectory of a step as its T sampled tokens, in order; what the environment said is no step."""

    group: int  # ticket number
    rewards: FloatArray  # (T,) what each token earned: a turn's reward on its last token, the KL penalty on each
    values: FloatArray | None = None  # (T,) the critic's, of the state in which each token was sampled
    trained: bool = True  # False: it counts in its group's mean, but no gradient comes from it


@dataclass(frozen=True, eq=False)
class Estimate:
    """What a whole-batch estimator says about one row."""

    advantages: FloatArray  # (T,)
    returns: FloatArray | None = None  # (T,) what the critic is to learn


class BatchEstimator(Protocol):
    """``(rows, algorithm)`` of a whole step to one estimate per row; marked by ``whole_batch``, for it cannot stream."""

    needs_batch: bool

    def __call__(self, rows: Sequence[Row], algorithm: AlgorithmSection) -> list[Estimate]: ...


def whole_batch(estimator: F) -> F:
    """Marks an estimator that takes the rows of a whole step in place of one group's trajectories."""
    estimator.needs_batch = True  # type: ignore[attr-defined]
    return estimator


def rewards_of(trajectories: Sequence[wire.Trajectory]) -> FloatArray:
    """Total rewards, shape (num_episodes,); step-independent samples share their episode's number, and the last one's reward counts."""
    return np.array(list({one.episode: one.reward for one in trajectories}.values()), dtype=np.float64)


def spread(values: FloatArray, trajectories: Sequence[wire.Trajectory]) -> list[FloatArray]:
    """One value per episode, as ``rewards_of`` orders them, repeated over the sampled tokens of its trajectories."""
    by_episode = dict(zip(dict.fromkeys(one.episode for one in trajectories), values, strict=True))
    return [by_episode[one.episode] * one.loss_mask.array().astype(np.float64) for one in trajectories]


def turn_rewards(trajectory: wire.Trajectory) -> FloatArray:
    """What each turn earned, (num_turns,): what the turns do not account for (reward hubs) came after the last one."""
    rewards = np.array([turn.reward for turn in trajectory.turns], dtype=np.float64)
    if len(rewards):
        rewards[-1] += trajectory.reward - rewards.sum()
    return rewards


def sampled_positions(trajectory: wire.Trajectory) -> npt.NDArray[np.int64]:
    """Where the sampled tokens stand, ascending, (T,); position 0 never counts, as nothing predicts it."""
    return np.flatnonzero(trajectory.loss_mask.array()[1:]) + 1


def token_rewards(trajectory: wire.Trajectory) -> FloatArray:
    """What each sampled token earned, (T,): a turn's reward stands on its last token, that of a turn without tokens on the one before."""
    positions = sampled_positions(trajectory)
    rewards = np.zeros(len(positions))
    if len(positions):
        for turn, reward in zip(trajectory.turns, turn_rewards(trajectory), strict=True):
            rewards[max(int(np.searchsorted(positions, turn.end)) - 1, 0)] += reward
    return rewards


def discounted(rewards: FloatArray, gamma: float) -> FloatArray:
    """``sum over k >= 0 of gamma^k r[t + k]``, (T,) to (T,)."""
    returns = np.empty_like(rewards)
    running = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        running = rewards[t] + gamma * running
        returns[t] = running
    return returns


def whiten(arrays: Sequence[FloatArray], counted: Sequence[bool]) -> list[FloatArray]:
    """``(A - mean) / (std + 1e-8)`` over the tokens of the counted arrays together, ddof 1; equal ones, and one alone, give exactly 0.

    Args:
        arrays: (T,) each.
        counted: False where no gradient comes from an array; it is 0 then.
    """
    pool = np.concatenate([array for array, counts in zip(arrays, counted, strict=True) if counts] or [np.zeros(0)])
    if len(pool) < 2 or pool.min() == pool.max():
        return [np.zeros_like(array) for array in arrays]
    mean, scale = pool.mean(), pool.std(ddof=1) + 1e-8
    return [(array - mean) / scale if counts else np.zeros_like(array) for array, counts in zip(arrays, counted, strict=True)]
