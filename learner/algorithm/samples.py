"""Defines training samples: unpacked trajectories with their advantages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from broker.contract import wire

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class TrainSample:
    """One training sequence of n tokens; arrays have shape (n,), masked positions are not read."""

    token_ids: Array  # int32
    loss_mask: Array  # uint8, 1 for trained tokens; 0 at position 0, which is never predicted
    rollout_logprobs: Array  # float32, natural log, of the sampling distribution
    versions: Array  # int32, policy version that sampled the token, -1 where the mask is 0
    advantages: Array  # float32
    group: int  # ticket number
    reward: float
    temperature: float = 1.0  # divides the logits, as in sampling
    # float32, under the policy at the start of the step; None: not recomputed
    proximal_logprobs: Array | None = None
    # float32, the critic's at the start of the step, of each token's state
    values: Array | None = None
    returns: Array | None = None  # float32, targets of the critic
    # float32, natural log, of a teacher at temperature 1; None: no teacher has scored it
    teacher_logprobs: Array | None = None
    # int32 and float32, (k T,): the teacher's k likeliest tokens at each of T trained tokens
    teacher_top_ids: Array | None = None
    teacher_top_logprobs: Array | None = None
    # uint8, 1 for tokens that the loss treats differently; None: the loss does not select
    selected: Array | None = None

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        for name in ("token_ids", "loss_mask", "rollout_logprobs", "versions", "advantages"):
            if getattr(self, name).shape != (n,):
                raise ValueError(f"{name} has shape {getattr(self, name).shape}, expected ({n},)")
        for name in ("proximal_logprobs", "values", "returns", "teacher_logprobs", "selected"):
            if (array := getattr(self, name)) is not None and array.shape != (n,):
                raise ValueError(f"{name} has shape {array.shape}, expected ({n},)")
        if n and self.loss_mask[0]:
            raise ValueError("loss_mask is 1 at position 0, which is never predicted")
        if not self.temperature > 0:
            raise ValueError(
                f"temperature {self.temperature} is not above 0: greedy tokens have no gradient"
            )

    @cached_property
    def positions(self) -> Array:
        """Positions where the mask is 1, ascending, (num_tokens,) int64."""
        return np.flatnonzero(self.loss_mask)

    @cached_property
    def observed_positions(self) -> Array:
        """Positions of what was said to the policy between its trained tokens, ascending, int64."""
        if not len(self.positions):
            return self.positions
        first = int(self.positions[0])
        return np.flatnonzero(self.loss_mask[first : self.num_inputs] == 0) + first

    @property
    def num_tokens(self) -> int:
        """Number of trained tokens."""
        return len(self.positions)

    @property
    def num_inputs(self) -> int:
        """Number of tokens that a forward pass reads: all before the last trained one."""
        return int(self.positions[-1]) if len(self.positions) else 0


@dataclass(frozen=True, eq=False)
class SampleScores:
    """Scores of a sample's T trained tokens before the step; None if not computed."""

    logprobs: Array | None = None  # (T,) float32, under the policy
    kl: Array | None = None  # (T,) float32, estimate of the divergence from the reference, in nats
    values: Array | None = None  # (T,) float32, the critic's
    # (T,) float32, squared norm of the gradient of each logprob by the logits
    energies: Array | None = None


def from_trajectory(
    trajectory: wire.Trajectory,
    advantages: Array,
    *,
    group: int,
    temperature: float = 1.0,
    trained: bool = True,
) -> TrainSample:
    """Unpack one trajectory.

    Args:
        trajectory: has passed ``checks.check_trajectory``.
        advantages: (n,), one value per token; masked positions are ignored.
        group: ticket number.
        temperature: of the sampling.
        trained: False masks every token.
    """
    sampled = trajectory.loss_mask.array().astype(bool)
    runs = trajectory.version_runs.array().reshape(-1, 2)
    versions = np.full(len(sampled), -1, np.int32)
    versions[sampled] = np.repeat(runs[:, 0], runs[:, 1])
    mask = sampled.copy()
    # The first token is sampled from an empty context, so it has no logprob.
    mask[:1] = False
    if not trained:
        mask[:] = False
    teacher = trajectory.teacher
    return TrainSample(
        token_ids=trajectory.token_ids.array(),
        loss_mask=mask.astype(np.uint8),
        rollout_logprobs=trajectory.logprobs.array(),
        versions=np.where(mask, versions, -1).astype(np.int32),
        advantages=np.where(mask, advantages, 0.0).astype(np.float32),
        group=group,
        reward=trajectory.reward,
        temperature=temperature,
        teacher_logprobs=None if teacher is None else teacher.logprobs.array(),
        **_select_top(teacher, mask[sampled]),
    )


def _select_top(teacher: wire.TeacherScores | None, is_trained: Array) -> dict[str, Array]:
    """Return a teacher's likeliest tokens at those of the sampled ones that are trained, flat."""
    if teacher is None or teacher.top_ids is None or teacher.top_logprobs is None:
        return {}
    columns = {"teacher_top_ids": teacher.top_ids, "teacher_top_logprobs": teacher.top_logprobs}
    return {
        name: column.array().reshape(len(is_trained), -1)[is_trained].reshape(-1)
        for name, column in columns.items()
    }
