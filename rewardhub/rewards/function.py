"""From a reward's name to something that scores: a class of the registry, or a function of the user's own.

A function is called as ``function(sample, **args)`` with a ``rewardhub.rewards.base.Sample``, and returns a number or a mapping
of part names to numbers; it may be a coroutine function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from broker.errors import ConfigError
from broker.settings.config import Reward
from broker.settings.registry import check_method, resolve
from broker.settings.sections import parse
from rewardhub.rewards import REWARDS
from rewardhub.rewards.base import Sample

Score = Callable[[Sample], object]


@dataclass(frozen=True)
class Concurrent:
    """How a reward that scores many samples at once wants to be run.

    Attributes:
        at_once: samples in one process.
        timeout_s: of one score.
        on_gpu: a process for each GPU.
    """

    at_once: int
    timeout_s: float
    on_gpu: bool


def load(name: str, args: Mapping[str, Any], key: str = "rewards") -> Score:
    """A callable that scores one sample, ready to use.

    Raises:
        ConfigError: as ``check``.
    """
    found = _resolve(name, key)
    if inspect.isclass(found):
        make: Any = found
        score: Score = make(_class_args(found, name, args, key)).score
        return score
    _check_call(found, args, key)
    return partial(found, **args)


def check(name: str, args: Mapping[str, Any], key: str = "rewards") -> Any:
    """Refuse a reward that cannot be loaded, without making it; its validated ``Args``, None for a function.

    Raises:
        ConfigError: an unknown name (the known ones are listed), no such module, file or function, or arguments it does not take.
    """
    found = _resolve(name, key)
    if not inspect.isclass(found):
        _check_call(found, args, key)
        return None
    checked = _class_args(found, name, args, key)
    if (look := getattr(found, "check", None)) is not None:
        try:
            look(checked)
        except ConfigError as error:
            raise ConfigError(f"{key}.args.{error.key}", error.value, error.allowed) from None
    return checked


def concurrent(reward: Reward) -> Concurrent | None:
    """How to run it, None for one that scores one sample at a time: those of the user's own all do, and are not imported here.

    Raises:
        ConfigError: as ``check``.
    """
    if reward.name not in REWARDS:
        return None
    found = _resolve(reward.name, "rewards")
    if not getattr(found, "concurrent", False):
        return None
    args = _class_args(found, reward.name, reward.args, "rewards")
    return Concurrent(args.max_concurrency, args.timeout_s, getattr(found, "on_gpu", False))


def _resolve(name: str, key: str) -> Any:
    try:
        found = resolve("rewards", name, REWARDS)
    except ConfigError as error:
        raise ConfigError(f"{key}.name", name, error.allowed) from None
    if not callable(found):
        raise ConfigError(f"{key}.name", name, f"expected a function or a class, found an object of type {type(found).__name__}")
    if inspect.isclass(found):
        check_method(f"{key}.name", name, found, "score", ("sample",))
    return found


def _class_args(found: Any, name: str, args: Mapping[str, Any], key: str) -> Any:
    model = getattr(found, "Args", None)
    if model is None:
        raise ConfigError(f"{key}.name", name, "a class must have Args, a pydantic model of its arguments")
    return parse(f"{key}.args", dict(args), model)


def _check_call(function: Any, args: Mapping[str, Any], key: str) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some callables written in C tell nothing
        return
    try:
        signature.bind(None, **args)
    except TypeError as error:
        shown = f"{getattr(function, '__name__', 'it')}{signature}"
        raise ConfigError(f"{key}.args", dict(args), f"{shown} is called with a sample and these, but {error}") from None
