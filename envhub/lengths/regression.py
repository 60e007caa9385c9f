"""Predicts a turn from its prompt, by a linear regression of log lengths that learns every turn.

Features: length of the context, number of the turn, length of the turn before, and which tokens the
end of the context holds, hashed. What they do not explain is left to the effects of tasks
(``envhub.lengths.history``). The regression is solved now and then from running means of the
features' products; each weight is drawn to zero, hashed tokens most, as nearly all of them mean
nothing.
"""

from __future__ import annotations

import math
from array import array
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from broker.settings.config import NoArguments
from envhub.lengths.base import LengthKnowledge, UpcomingTurn
from envhub.lengths.history import LEVELS, TaskHistory

NUM_PLAIN: Final = 4
NUM_HASHED: Final = 32  # a power of two
SIZE: Final = NUM_PLAIN + NUM_HASHED
END: Final = 256  # tokens at the end of the context
MEMORY: Final = 2000  # turns that the means are made of
SOLVE_EVERY: Final = 16
# turns that say as much as the belief that a weight is zero
PRIOR_PLAIN = 20.0
PRIOR_HASHED = 1000.0
_MULTIPLIER: Final = np.uint32(2654435761)  # 2^32 divided by the golden ratio
_SHIFT: Final = np.uint32(33 - NUM_HASHED.bit_length())
_LOG1P: Final = np.log1p(np.arange(END + 1))
_PRIOR: Final = np.array([PRIOR_PLAIN] * NUM_PLAIN + [PRIOR_HASHED] * NUM_HASHED)
# numbers in the knowledge, besides those of the history
_OWN: Final = SIZE + SIZE + SIZE * (SIZE + 1) // 2 + 1
_LOWER: Final = np.tril_indices(SIZE)

Vector = npt.NDArray[np.float64]


class OnlineRegression(TaskHistory):
    """Levels of turns, weights of features, effects of tasks; see the module."""

    Args = NoArguments

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self._center = np.zeros(SIZE)
        self._with_above = np.zeros(SIZE)
        self._products = np.zeros((SIZE, SIZE))
        self._weights = np.zeros(SIZE)
        self._offset = 0.0
        self._learnt = 0.0  # turns in the means, by weight, at most MEMORY
        self._unsolved = 0.0  # turns since the regression was solved

    def _without_task(self, turn: UpcomingTurn) -> tuple[float, Any]:
        features = turn_features(turn)
        return self._level(turn.turn) + float(self._weights.dot(features)) - self._offset, features

    def _learn(self, features: Vector, above: float, weight: float) -> None:
        self._learnt = min(self._learnt + weight, MEMORY)
        self._unsolved = self._unsolved + weight
        share = weight / self._learnt
        self._center += share * (features - self._center)
        centered = features - self._center
        self._products += share * (np.multiply.outer(centered, centered) - self._products)
        self._with_above += share * (centered * above - self._with_above)
        if self._unsolved >= SOLVE_EVERY:
            self._unsolved %= SOLVE_EVERY
            self._solve()

    def _solve(self) -> None:
        variances = np.diagonal(self._products)
        # the last term keeps it invertible where a feature never varies
        damped = self._products + np.diag(variances * _PRIOR / self._learnt + 1e-9)
        self._weights = np.asarray(np.linalg.solve(damped, self._with_above), np.float64)
        self._offset = float(self._weights @ self._center)

    def knowledge(self) -> LengthKnowledge:
        """Return the means of features and products, after those of the history."""
        history = super().knowledge()
        own = [self._center, self._with_above, self._products[_LOWER], np.array([self._learnt])]
        return history._replace(values=np.concatenate([history.values, *own], dtype=np.float32))

    def adopt(self, knowledge: LengthKnowledge) -> bool:
        """Take over all means and solve the regression."""
        values = knowledge.values.astype(np.float64)
        if values.shape != (2 * LEVELS + 4 + _OWN,):
            return False
        own = values[-_OWN:]
        products = np.zeros((SIZE, SIZE))
        products[_LOWER] = own[2 * SIZE : -1]
        products += np.tril(products, -1).T
        if np.diagonal(products).min() < 0 or own[-1] < 0:
            return False
        super().adopt(knowledge._replace(values=knowledge.values[:-_OWN]))
        self._center = own[:SIZE]
        self._with_above = own[SIZE : 2 * SIZE]
        self._products = products
        self._learnt = min(float(own[-1]), MEMORY)
        if self._learnt >= SOLVE_EVERY:
            self._solve()
        return True


def turn_features(turn: UpcomingTurn) -> Vector:
    """Return the features of a turn, shape (36,)."""
    ids = turn.token_ids
    features = np.empty(SIZE)
    # a copy, while the context may grow
    last = ids[-END:]
    if isinstance(last, array):
        tokens = np.frombuffer(last, np.uint32)
    else:
        tokens = np.array(last, np.uint32)
    features[NUM_PLAIN:] = _LOG1P[np.bincount(tokens * _MULTIPLIER >> _SHIFT, minlength=NUM_HASHED)]
    features[:NUM_PLAIN] = (
        math.log(len(ids) or 1),
        math.log1p(turn.turn),
        turn.turn > 0,
        math.log1p(turn.previous),
    )
    return features
