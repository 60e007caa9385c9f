"""Predicts the lengths of one domain's turns, by its estimator or else by the running mean.

An estimator that fails costs its prediction of that turn only; one whose predictions have been
clearly worse than the mean is not used until they are better. One that hangs is interrupted, and
not called again.
"""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from broker.contract import wire
from broker.system.fault import told
from envhub.lengths.base import LengthEstimator, UpcomingTurn
from envhub.lengths.corrections import CorrectedEstimator, LengthCalibration, Quantiles
from envhub.lengths.history import TaskHistory
from envhub.lengths.mean import RunningMean
from envhub.lengths.regression import OnlineRegression

log = logging.getLogger(__name__)

INSTEAD: Final = "the running mean is used instead"
# turns, before an estimator can count as worse than the mean
JUDGED_AFTER: Final = 100
# times the mean's error
WORSE: Final = 1.25
# these return at once
BUILT_IN: Final = (RunningMean, TaskHistory, OnlineRegression)
# an error below this does no harm, whatever the mean's is
MATTERS: Final = math.log(1.1)
# at most, with its imports
STARTS_S: Final = 60.0
# of a prediction, in which the hub can do nothing
HANGS_S: Final = 1.0
SLOW_S: Final = 0.001  # of a prediction
# a single one may be slow because the machine is busy
SLOW_IN_A_ROW: Final = 20
MEANING: Final = "in which the hub can do nothing else"
T = TypeVar("T")


@dataclass(slots=True, frozen=True)
class LengthPrediction:
    """A prediction of one turn, to be passed to ``LengthPredictor.add`` with its length.

    Attributes:
        turn: what it is of.
        expected, high: median and 0.9 quantile in tokens, from 1 to ``max_tokens``; 0 unknown.
    """

    turn: UpcomingTurn
    expected: int
    high: int
    own: Quantiles | None = None
    fallback: Quantiles | None = None


class LengthPredictor:
    """Predicts and learns for one domain.

    Args:
        domain: name, for the log.
        estimator: the configured one.
        calibration: of the hub.

    Attributes:
        new: turns learnt from since ``envhub.lengths.shared`` last shared what is known.
        merged: turns of the shared record at that time.
    """

    def __init__(
        self, domain: str, estimator: LengthEstimator, calibration: LengthCalibration
    ) -> None:
        self._domain = domain
        self._calibration = calibration
        self._own = CorrectedEstimator(estimator)
        self._mean = CorrectedEstimator(RunningMean())
        self._noted: set[str] = set()
        self._limit_s = math.inf if type(estimator) in BUILT_IN else HANGS_S
        self._hangs = False
        self._slow_s: list[float] = []  # times of the last predictions, all of which took long
        self.new = self.merged = 0

    @classmethod
    def of(
        cls, domain: str, make: Callable[[], LengthEstimator], calibration: LengthCalibration
    ) -> LengthPredictor:
        """Return a predictor with a new estimator; with the mean if that fails to start."""
        try:
            with time_limit(STARTS_S):
                return cls(domain, make(), calibration)
        except BaseException as error:  # noqa: BLE001 - it may be the user's code
            predictor = cls(domain, RunningMean(), calibration)
            predictor._note("starts", f"{told(error)}; {INSTEAD}")
            return predictor

    @property
    def estimator(self) -> LengthEstimator:
        """The configured estimator."""
        return self._own.estimator

    def predict(self, turn: UpcomingTurn) -> LengthPrediction:
        """Predict a turn, by the mean if the estimator fails or has been clearly worse."""
        fallback = self._mean.predict(turn)
        started_at = time.perf_counter()
        own = self._ask(self._own.predict, turn)
        duration_s = time.perf_counter() - started_at
        if duration_s > SLOW_S:
            self._slow_s.append(duration_s)
        else:
            self._slow_s.clear()
        if len(self._slow_s) == SLOW_IN_A_ROW:
            typical = sorted(self._slow_s)[SLOW_IN_A_ROW // 2] * 1000
            self._note(
                "slow",
                f"{SLOW_IN_A_ROW} predictions in a row took about {typical:.2g} ms each, {MEANING}",
            )
            self._slow_s = []
        quantiles = self._better(own, fallback)
        if quantiles is None:
            return LengthPrediction(turn, 0, 0, own, fallback)
        median, high = (
            min(max(round(math.exp(min(quantile, 30.0))), 1), turn.max_tokens)
            for quantile in quantiles[:2]
        )
        return LengthPrediction(turn, median, high, own, fallback)

    def add(self, prediction: LengthPrediction, tokens: int) -> None:
        """Learn from a predicted turn that is finished."""
        turn = prediction.turn
        own = prediction.own
        fallback = prediction.fallback
        if (quantiles := self._better(own, fallback)) is not None:
            self._calibration.add(quantiles, math.log(max(tokens, 1)), math.log(turn.max_tokens))
        self._mean.learn(fallback, turn, tokens)
        self._ask(self._own.learn, own, turn, tokens)
        self.new += 1
        if self._is_worse:
            own_factor, mean_factor = (
                math.exp(corrected.error) for corrected in (self._own, self._mean)
            )
            self._note(
                "errs",
                f"its predictions are off by a factor of {own_factor:.3g}, "
                f"the mean by {mean_factor:.3g}; {INSTEAD}",
            )

    def _better(self, own: Quantiles | None, fallback: Quantiles | None) -> Quantiles | None:
        return fallback if own is None or self._is_worse else own

    @property
    def _is_worse(self) -> bool:
        return self._own.num_turns >= JUDGED_AFTER and self._own.error > max(
            WORSE * self._mean.error, MATTERS
        )

    def _ask(self, method: Callable[..., T], *arguments: Any) -> T | None:
        """Call a method of the estimator; return None if it raises or hangs, or has hung before."""
        if self._hangs:
            return None
        try:
            with time_limit(self._limit_s):
                return method(*arguments)
        except Interrupted:
            self._hangs = True
            self._note(
                "hangs", f"it takes longer than {HANGS_S:g} s and is not called again; {INSTEAD}"
            )
        except BaseException as error:  # noqa: BLE001 - it may be the user's code
            # no cancellation can arrive here
            self._note("fails", f"{told(error)}; {INSTEAD}")
        return None

    def _note(self, fault: str, text: str) -> None:
        """Log a fault once."""
        if fault not in self._noted:
            self._noted.add(fault)
            log.warning("domains.%s.length_estimator: %s", self._domain, text)


class Interrupted(BaseException):
    """Raised in code that takes too long; no Exception, so that the code does not catch it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise ``Interrupted`` in Python code that runs longer; only in the main thread."""
    if math.isinf(seconds) or threading.current_thread() is not threading.main_thread():
        yield
        return
    running = True

    def interrupt(*_: Any) -> None:
        if running:
            raise Interrupted(f"it takes longer than {seconds:g} s")

    handler = signal.signal(signal.SIGALRM, interrupt)
    # again, if it catches everything
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, 0.1)
    try:
        yield
    finally:
        # first: the timer may fire once more before it is reset
        running = False
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


class HubLengths:
    """The predictors of a hub.

    Attributes:
        calibration: of the predictions for the trained policy.
        trained: its predictors, by domain.
    """

    def __init__(self) -> None:
        self.calibration = LengthCalibration()
        self.trained: dict[str, LengthPredictor] = {}
        self._others: dict[tuple[str, str], LengthPredictor] = {}
        self._choices: dict[str, Callable[[], LengthEstimator]] = {}

    def of(self, domain: str, make: Callable[[], LengthEstimator], policy: str) -> LengthPredictor:
        """Return the predictor for a domain's turns; a baseline policy has its own, by the mean.

        Args:
            make: for the first of a domain; ``renew`` replaces it, also for tickets with earlier
                settings.
        """
        if policy != wire.ACTOR:
            unused = LengthCalibration()
            return self._others.setdefault(
                (domain, policy), LengthPredictor(domain, RunningMean(), unused)
            )
        if domain not in self.trained:
            self.renew(domain, make)
        return self.trained[domain]

    def renew(self, domain: str, make: Callable[[], LengthEstimator]) -> None:
        """Use a domain's new settings; a predictor with the same estimator is kept."""
        if self._choices.get(domain) != make:
            self.trained[domain] = LengthPredictor.of(domain, make, self.calibration)
            self._choices[domain] = make
