"""What every estimator is: a pure function of one group's trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from broker import wire
from learner.config import AlgorithmSection

FloatArray = npt.NDArray[np.float64]


class Estimator(Protocol):
    """``(trajectories, algorithm)`` to one array of shape (n,) per trajectory: each token's advantage, 0 where the mask is 0."""

    def __call__(self, trajectories: Sequence[wire.Trajectory], algorithm: AlgorithmSection) -> list[FloatArray]: ...


def rewards_of(trajectories: Sequence[wire.Trajectory]) -> FloatArray:
    """Total rewards, shape (len(trajectories),)."""
    return np.array([trajectory.reward for trajectory in trajectories], dtype=np.float64)


def spread(values: FloatArray, trajectories: Sequence[wire.Trajectory]) -> list[FloatArray]:
    """One value per trajectory, repeated over its sampled tokens."""
    return [value * trajectory.loss_mask.array().astype(np.float64) for value, trajectory in zip(values, trajectories, strict=True)]
