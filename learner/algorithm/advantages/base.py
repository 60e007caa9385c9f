"""Defines estimators: pure functions of one group's trajectories, or of a whole step's rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from broker.contract import wire
from learner.config import AlgorithmSection

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class AdvantageEstimator(Protocol):
    """Maps ``(trajectories, algorithm)`` to each trajectory's (n,) advantages, 0 where masked."""

    def __call__(
        self, trajectories: Sequence[wire.Trajectory], algorithm: AlgorithmSection
    ) -> list[FloatArray]: ...


@dataclass(frozen=True, eq=False)
class BatchRow:
    """Sampled tokens of one trajectory of a step, T in order, without those of the environment."""

    group: int  # equal for rows whose rewards are compared: of one ticket, and one seat in it
    # (T,) reward of each token: a turn's on its last token, the KL penalty on each
    rewards: FloatArray
    # (T,) the critic's, of the state in which each token was sampled
    values: FloatArray | None = None
    trained: bool = True  # False: counts in its group's mean, but has no gradient
    turns: IntArray | None = None  # (T,) number of each token's turn; None: all in one turn
    # (T,) squared norm of the gradient of each token's logprob by the logits
    energies: FloatArray | None = None
    # rewards of the episode by name, before weights and shaping; notes as name/note
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class AdvantageEstimate:
    """Result of a whole-batch estimator for one row."""

    advantages: FloatArray  # (T,)
    returns: FloatArray | None = None  # (T,) targets of the critic


class BatchEstimator(Protocol):
    """Maps ``(rows, algorithm)`` of a step to one estimate per row; declares ``whole_batch``."""

    def __call__(
        self, rows: Sequence[BatchRow], algorithm: AlgorithmSection
    ) -> list[AdvantageEstimate]: ...


def rewards_of(trajectories: Sequence[wire.Trajectory]) -> FloatArray:
    """Return the episodes' total rewards, (num_episodes,): that of an episode's last sample."""
    return np.array(
        list({trajectory.episode: trajectory.reward for trajectory in trajectories}.values()),
        dtype=np.float64,
    )


def spread_over_tokens(
    values: FloatArray, trajectories: Sequence[wire.Trajectory]
) -> list[FloatArray]:
    """Repeat each episode's value, in ``rewards_of`` order, on the episode's sampled tokens."""
    by_episode = dict(
        zip(dict.fromkeys(trajectory.episode for trajectory in trajectories), values, strict=True)
    )
    return [
        by_episode[trajectory.episode] * trajectory.loss_mask.array().astype(np.float64)
        for trajectory in trajectories
    ]


def turn_rewards(trajectory: wire.Trajectory) -> FloatArray:
    """Return each turn's reward, (num_turns,); reward hubs' share of the total is the last's."""
    rewards = np.array([turn.reward for turn in trajectory.turns], dtype=np.float64)
    if len(rewards):
        rewards[-1] += trajectory.reward - rewards.sum()
    return rewards


def sampled_positions(trajectory: wire.Trajectory) -> IntArray:
    """Return the ascending positions of the sampled tokens, (T,); 0 is never predicted."""
    return np.flatnonzero(trajectory.loss_mask.array()[1:]) + 1


def token_rewards(trajectory: wire.Trajectory) -> FloatArray:
    """Return each sampled token's reward, (T,): a turn's is on the last token up to its end."""
    positions = sampled_positions(trajectory)
    rewards = np.zeros(len(positions))
    if len(positions):
        for turn, reward in zip(trajectory.turns, turn_rewards(trajectory), strict=True):
            rewards[max(int(np.searchsorted(positions, turn.end)) - 1, 0)] += reward
    return rewards


def token_turns(trajectory: wire.Trajectory) -> IntArray:
    """Return the number of each sampled token's turn, (T,), ascending."""
    ends = [turn.end for turn in trajectory.turns]
    return np.searchsorted(ends, sampled_positions(trajectory), side="right").astype(np.int64)


def row_discounts(row: BatchRow, algorithm: AlgorithmSection) -> FloatArray:
    """Return what a row's tokens discount what follows them by, as ``step_discounts`` does."""
    turns = np.zeros(len(row.rewards), np.int64) if row.turns is None else row.turns
    return step_discounts(turns, algorithm)


def step_discounts(turns: IntArray, algorithm: AlgorithmSection) -> FloatArray:
    """Return what each token discounts what follows it by, (T,).

    ``gamma`` at every token, or with ``discount: turn`` only where the next token is of another
    turn, and 1 within turns.

    Args:
        turns: (T,) number of each token's turn.
    """
    if algorithm.discount == "token":
        return np.full(len(turns), algorithm.gamma)
    is_last = np.append(turns[1:] != turns[:-1], True)[: len(turns)]
    return np.where(is_last, algorithm.gamma, 1.0)


def discounted_returns(rewards: FloatArray, gamma: float | FloatArray) -> FloatArray:
    """Return ``sum over k >= 0 of gamma^k r[t + k]``, (T,) to (T,).

    Args:
        gamma: a number, or (T,), by which each token discounts what follows it.
    """
    discounts = np.broadcast_to(gamma, rewards.shape)
    returns = np.empty_like(rewards)
    running = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        running = rewards[t] + discounts[t] * running
        returns[t] = running
    return returns


def whiten_arrays(arrays: Sequence[FloatArray], is_trained: Sequence[bool]) -> list[FloatArray]:
    """Return ``(A - mean) / (std + 1e-8)`` over all tokens, ddof 1; exactly 0 if all are equal.

    Args:
        arrays: (T,) each.
        is_trained: False for arrays without gradient, which become 0.
    """
    pairs = list(zip(arrays, is_trained, strict=True))
    pool = np.concatenate([array for array, counts in pairs if counts] or [np.zeros(0)])
    if len(pool) < 2 or pool.min() == pool.max():
        return [np.zeros_like(array) for array in arrays]
    mean = pool.mean()
    scale = pool.std(ddof=1) + 1e-8
    return [(array - mean) / scale if counts else np.zeros_like(array) for array, counts in pairs]
