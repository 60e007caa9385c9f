"""Predicts the running mean of the domain's turns."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from broker.settings.config import NoArguments
from envhub.lengths.base import LengthEstimator, LengthKnowledge, UpcomingTurn

DECAY: Final = 0.05
_NONE: Final = np.zeros(0, np.float32)


class RunningMean(LengthEstimator):
    """The same for all turns of the domain; what a hub falls back to."""

    Args = NoArguments

    def __init__(self, args: Any = None) -> None:
        super().__init__(args)
        self._mean = 0.0

    def predict(self, turn: UpcomingTurn) -> float | None:
        """Return the running mean, None before the first turn."""
        return self._mean or None

    def observe(self, turn: UpcomingTurn, tokens: int) -> None:
        """Add a finished turn."""
        if self._mean:
            self._mean += (tokens - self._mean) * DECAY
        else:
            self._mean = float(tokens)

    def knowledge(self) -> LengthKnowledge:
        """Return the mean as the only value."""
        return LengthKnowledge(
            np.array([self._mean], np.float32), np.zeros(0, np.int32), _NONE, _NONE
        )

    def adopt(self, knowledge: LengthKnowledge) -> bool:
        """Take over the mean."""
        if knowledge.values.shape != (1,) or knowledge.values[0] < 0:
            return False
        self._mean = float(knowledge.values[0])
        return True
