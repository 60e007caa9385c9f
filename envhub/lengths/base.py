"""What a length estimator is: it predicts how many tokens the policy's next turn will have.

Servers start the turns first that are predicted to be long (docs/scheduling.md). A prediction
decides when a turn is sampled, never what is sampled, so an estimator cannot change what the policy
learns from a finished group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from broker.settings.config import Section
from envhub.envs.base import Split


@dataclass(slots=True)
class UpcomingTurn:
    """A turn that is about to be sampled.

    Attributes:
        token_ids: the whole context, n token ids.
        max_tokens: most tokens that the turn can have.
        task: a number that is the same for episodes with the same first prompt: those of a group,
            and later ones.
        turn: turns of the policy before this one in its episode.
        previous: tokens of the turn before it, 0 for the first.
        task_index, split: the environment's task.
        notes: for the estimator, from ``predict`` to ``observe``.
    """

    token_ids: Sequence[int]
    max_tokens: int
    task: int = 0
    turn: int = 0
    previous: int = 0
    task_index: int = 0
    split: Split = "train"
    notes: Any = None


class LengthKnowledge(NamedTuple):
    """What an estimator has learnt, as running means, which several hubs can average.

    Attributes:
        values: shape (n,), float32.
        tasks: shape (k,), int32: tasks with an entry of their own.
        counts: shape (k,), float32: turns that a task's mean is made of.
        means: shape (k,), float32.
    """

    values: npt.NDArray[np.float32]
    tasks: npt.NDArray[np.int32]
    counts: npt.NDArray[np.float32]
    means: npt.NDArray[np.float32]


class LengthEstimator:
    """Base of length estimators: one instance serves one domain of one hub, on one thread.

    Attributes:
        Args: the section ``length_estimator_args`` of the domain; unknown keys are refused.
    """

    Args: ClassVar[type[Section]] = Section

    def __init__(self, args: Any) -> None:
        self.args = args

    def predict(self, turn: UpcomingTurn) -> float | tuple[float, float] | None:
        """Return the median of the turn's length, or median and 0.9 quantile; None: not known.

        Both are in tokens, above 0, and need not respect ``max_tokens``. The hub corrects what is
        systematically too short or too long.
        """
        raise NotImplementedError

    def observe(self, turn: UpcomingTurn, tokens: int) -> None:
        """Learn from a finished turn; one of ``max_tokens`` tokens was cut off."""

    def knowledge(self) -> LengthKnowledge | None:
        """Return what a hub that starts later should know, None if nothing is to be kept."""
        return None

    def adopt(self, knowledge: LengthKnowledge) -> bool:
        """Adopt what an estimator of the same class knows; return whether the shapes fit."""
        return False
