"""Resolves the length estimator that a domain's settings name, a class or a user's function."""

from __future__ import annotations

import inspect
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from broker.errors import ConfigError
from broker.settings.registry import check_call, check_method, resolve
from broker.settings.sections import parse
from envhub.lengths import ESTIMATORS
from envhub.lengths.base import LengthEstimator, UpcomingTurn


class FunctionEstimator(LengthEstimator):
    """A function used as ``LengthEstimator.predict``; it learns nothing."""

    def __init__(self, function: Callable[..., Any], args: Mapping[str, Any]) -> None:
        super().__init__(args)
        self._function = function

    def predict(self, turn: UpcomingTurn) -> Any:
        """Return what the function does."""
        return self._function(turn, **self.args)


@dataclass(frozen=True)
class EstimatorChoice:
    """A checked ``length_estimator`` with its arguments; call it for a new estimator."""

    name: str
    target: Any
    args: Any

    def __call__(self) -> LengthEstimator:
        """Return a new estimator."""
        if isinstance(self.target, type):
            estimator: LengthEstimator = self.target(self.args)
            return estimator
        return FunctionEstimator(self.target, self.args)


def load_estimator(domain: str, name: str, args: Mapping[str, Any]) -> EstimatorChoice:
    """Return the estimator that ``domains.<domain>.length_estimator`` names.

    Raises:
        ConfigError: if there is no such class or function, or an argument is not allowed.
    """
    key = f"domains.{domain}.length_estimator"
    try:
        target: Any = resolve("length_estimators", name, ESTIMATORS)
    except ConfigError as error:
        raise ConfigError(key, name, error.allowed) from None
    if isinstance(target, type):
        if not issubclass(target, LengthEstimator):
            raise ConfigError(
                key,
                name,
                "a class that derives from envhub.lengths.base.LengthEstimator, or a function",
            )
        check_method(key, name, target, "predict", ("turn",), base=LengthEstimator)
        check_method(key, name, target, "observe", ("turn", "tokens"))
        return EstimatorChoice(name, target, parse(f"{key}_args", dict(args), target.Args))
    if not args:
        check_call(key, name, target, ("turn",))
    else:
        try:
            inspect.signature(target).bind("turn", **args)
        except TypeError as error:
            raise ConfigError(f"{key}_args", dict(args), f"arguments of {name}: {error}") from None
    return EstimatorChoice(name, target, dict(args))


def task_key(prompt: Sequence[int]) -> int:
    """Return a 32-bit hash of an episode's first prompt, never 0."""
    ids = prompt if isinstance(prompt, array) else array("i", prompt)
    return zlib.crc32(ids.tobytes()) or 1
