"""Loads a reward by its name: a class of the registry, or a user's own function.

A function has one of the forms of ``rewardhub.rewards.function_forms``. It returns a number, a
mapping of part names to numbers, or a list with one number per turn, perhaps as a coroutine.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from broker.errors import ConfigError
from broker.settings.config import RewardConfig
from broker.settings.registry import check_method, resolve
from broker.settings.secret import resolved, variables
from broker.settings.sections import parse
from rewardhub.rewards import REWARDS
from rewardhub.rewards.base import Score
from rewardhub.rewards.function_forms import adapt_function, find_form


@dataclass(frozen=True)
class ConcurrencySettings:
    """How to run a reward that scores many samples at once.

    Attributes:
        at_once: samples at once in one process.
        timeout_s: time limit of one score.
        on_gpu: whether to start a process for each GPU.
    """

    at_once: int
    timeout_s: float
    on_gpu: bool


def load(name: str, args: Mapping[str, Any], key: str = "rewards") -> Score:
    """Return a callable that scores one sample.

    Raises:
        ConfigError: as in ``check``.
        UserError: if a secret that the arguments of a function name is missing.
    """
    reward_class = _resolve_reward(name, key)
    if inspect.isclass(reward_class):
        make: Any = reward_class
        score: Score = make(_class_args(reward_class, name, args, key)).score
        return score
    return adapt_function(reward_class, resolved(args, f"{key}.args"), key)


def check(name: str, args: Mapping[str, Any], key: str = "rewards") -> Any:
    """Check that a reward can be loaded, without loading it, and return its validated ``Args``,
    None for a function.

    Raises:
        ConfigError: for an unknown name (lists the known ones), a missing module, file or function,
            or bad arguments.
    """
    reward_class = _resolve_reward(name, key)
    if not inspect.isclass(reward_class):
        try:
            find_form(reward_class, args, key)
        except ConfigError as error:
            value = name if error.key == f"{key}.name" else error.value
            raise ConfigError(error.key, value, error.allowed) from None
        return None
    checked = _class_args(reward_class, name, args, key)
    if (look := getattr(reward_class, "check", None)) is not None:
        try:
            look(checked)
        except ConfigError as error:
            raise ConfigError(f"{key}.args.{error.key}", error.value, error.allowed) from None
    return checked


def variables_of(reward: RewardConfig) -> set[str]:
    """Return the environment variables that a reward or its defaults refer to as secrets.

    Raises:
        ConfigError: as in ``check``.
    """
    reward_class = _resolve_reward(reward.name, "rewards")
    return variables(
        _class_args(reward_class, reward.name, reward.args, "rewards")
        if inspect.isclass(reward_class)
        else reward.args
    )


def concurrency_of(reward: RewardConfig) -> ConcurrencySettings | None:
    """Return how to run a reward that scores many samples at once; None for others.

    Raises:
        ConfigError: as in ``check``.
    """
    if reward.name not in REWARDS:
        return None
    reward_class = _resolve_reward(reward.name, "rewards")
    choose = getattr(reward_class, "concurrent_section", None)
    if choose is None and not getattr(reward_class, "concurrent", False):
        return None
    args = _class_args(reward_class, reward.name, reward.args, "rewards")
    section = choose(args) if choose is not None else args
    if section is None:
        return None
    return ConcurrencySettings(
        section.max_concurrency, section.timeout_s, getattr(reward_class, "on_gpu", False)
    )


def _resolve_reward(name: str, key: str) -> Any:
    try:
        reward_class = resolve("rewards", name, REWARDS)
    except ConfigError as error:
        raise ConfigError(f"{key}.name", name, error.allowed) from None
    if not callable(reward_class):
        raise ConfigError(
            f"{key}.name",
            name,
            "expected a function or a class, found an object of type "
            f"{type(reward_class).__name__}",
        )
    if inspect.isclass(reward_class):
        check_method(f"{key}.name", name, reward_class, "score", ("sample",))
    return reward_class


def _class_args(reward_class: Any, name: str, args: Mapping[str, Any], key: str) -> Any:
    model = getattr(reward_class, "Args", None)
    if model is None:
        raise ConfigError(
            f"{key}.name", name, "a class must have Args, a pydantic model of its arguments"
        )
    return parse(f"{key}.args", dict(args), model)
