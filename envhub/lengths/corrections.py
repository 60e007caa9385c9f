"""Corrects the predictions of a length estimator, and measures how well they are calibrated.

Two corrections are learnt for each estimator, one of its median and one of its 0.9 quantile: each
moves up a little if a turn was longer than predicted and down a little if it was not, so that in
the long run a tenth of the turns is longer than the 0.9 quantile, whatever the estimator says.
"""

from __future__ import annotations

import math
import reprlib
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from broker.contract.lengths import HIGH
from envhub.lengths.base import LengthEstimator, UpcomingTurn

FIRST_SPREAD: Final = 0.7  # of log lengths, before any error is known
STEP: Final = 0.02  # of a correction, as a part of the mean error
# turns during which it moves faster
FIRST_STEPS: Final = 20
ERROR_MEMORY: Final = 200
MOST_TOKENS: Final = 1e12  # of a prediction


class Quantiles(NamedTuple):
    """A prediction in log tokens.

    Attributes:
        median, high: median and 0.9 quantile, corrected.
        raw_median, raw_high: before the corrections of that time.
    """

    median: float
    high: float
    raw_median: float
    raw_high: float


@dataclass(slots=True)
class LengthCalibration:
    """How a hub's predictions compare with its newest turns, as means; see docs/metrics-reference.md."""

    memory: int = 500
    error: float = 0.0
    below_median: float = 0.0
    below_high: float = 0.0
    _counts: list[int] = field(default_factory=lambda: [0, 0, 0])

    def add(self, predicted: Quantiles | tuple[float, float], actual: float, limit: float) -> None:
        """Add a turn, in log tokens. A quantile at the limit cannot be exceeded, so is left out."""
        median, high = predicted[:2]
        self.error += self._share(0) * (abs(actual - min(median, limit)) - self.error)
        if median < limit:
            self.below_median += self._share(1) * ((actual <= median) - self.below_median)
        if high < limit:
            self.below_high += self._share(2) * ((actual <= high) - self.below_high)

    def report(self) -> dict[str, float]:
        """Return the metrics; those without a turn are absent."""
        names = ("length/error", "length/calibration_50", "length/calibration_90")
        values = (self.error, self.below_median, self.below_high)
        return {
            name: value
            for name, value, count in zip(names, values, self._counts, strict=True)
            if count
        }

    def _share(self, index: int) -> float:
        self._counts[index] = min(self._counts[index] + 1, self.memory)
        return 1 / self._counts[index]


class CorrectedEstimator:
    """An estimator with two corrections and its error, the mean ``abs(log(tokens / median))``."""

    def __init__(self, estimator: LengthEstimator) -> None:
        self.estimator = estimator
        self.error = FIRST_SPREAD / 2
        self.num_turns = 0
        self._median = self._high = 0.0  # corrections
        self._has_high = True

    def predict(self, turn: UpcomingTurn) -> Quantiles | None:
        """Return the logs of median and 0.9 quantile; not limited by ``max_tokens``.

        Raises:
            Exception: what the estimator raises.
            ValueError: if it returns anything but positive numbers in order, or None.
        """
        prediction = self.estimator.predict(turn)
        if prediction is None:
            return None
        try:
            median, high = _to_numbers(prediction)
        except (TypeError, ValueError):
            median = high = math.nan
        if not (0 < median <= MOST_TOKENS and (not high or median <= high <= MOST_TOKENS)):
            raise ValueError(
                f"it predicts {reprlib.repr(prediction)}, not a number above 0, or two in order"
            )
        if self._has_high and not high:
            self._has_high = False
            self._high = FIRST_SPREAD
        return self._corrected(math.log(median), math.log(high or median))

    def learn(self, predicted: Quantiles | None, turn: UpcomingTurn, tokens: int) -> None:
        """Update the corrections and let the estimator learn.

        Raises:
            Exception: what the estimator raises.
        """
        if predicted is not None:
            actual = math.log(max(tokens, 1))
            limit = math.log(turn.max_tokens)
            # by the corrections of now: hundreds of turns may have ended since it was predicted,
            # and each of them would otherwise correct the same error once more
            median, high, _, _ = self._corrected(predicted.raw_median, predicted.raw_high)
            self.num_turns += 1
            step = self.error * max(STEP, 1 / (FIRST_STEPS + self.num_turns))
            # a turn that was cut off says nothing about a quantile beyond the limit
            if actual < limit or median < limit:
                self._median += step * ((actual > median) - 0.5)
            if actual < limit or high < limit:
                self._high += step * ((actual > high) - (1 - HIGH)) / HIGH
            self.error += (abs(actual - min(median, limit)) - self.error) / min(
                self.num_turns + 10, ERROR_MEMORY
            )
        self.estimator.observe(turn, tokens)

    def _corrected(self, median: float, high: float) -> Quantiles:
        corrected = median + self._median
        return Quantiles(
            corrected, max(high + self._high, corrected), raw_median=median, raw_high=high
        )


def _to_numbers(prediction: Any) -> tuple[float, float]:
    """Return median and 0.9 quantile, which is 0 if there is none."""
    if not isinstance(prediction, tuple):
        return _to_number(prediction), 0.0
    median, high = map(_to_number, prediction)
    return median, high


def _to_number(value: Any) -> float:
    # which float would read
    if isinstance(value, (str, bytes)):
        raise TypeError("not a number")
    return float(value)
