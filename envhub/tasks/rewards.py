"""Reads what a verifier wrote, and makes the reward of a task of its steps' rewards."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Final, Literal

Rewards = dict[str, float]
REWARD: Final = "reward"
MAX_BYTES: Final = 1 << 16
MAX_KEYS: Final = 64
# the lowest: for tests that the policy has broken
NOTHING: Final[Rewards] = {REWARD: 0.0}


class BadReward(ValueError):
    """A file that is no reward; says why in one line."""


def parse_rewards(json_text: bytes | None, text: bytes | None) -> Rewards:
    """Return the rewards of ``reward.json``, or if there is none of ``reward.txt``.

    Raises:
        BadReward: if there is neither, or it holds no finite numbers.
    """
    if json_text is None and text is None:
        raise BadReward("the tests wrote neither reward.txt nor reward.json to /logs/verifier")
    if json_text is None:
        return {REWARD: _parse_number(text or b"")}
    try:
        value = json.loads(json_text)
    except (ValueError, RecursionError):
        raise BadReward(f"reward.json is not JSON: {_shorten(json_text)}") from None
    if not isinstance(value, dict):
        return {REWARD: _check_number(value)}
    if not 0 < len(value) <= MAX_KEYS:
        raise BadReward(f"reward.json has {len(value)} keys; 1 to {MAX_KEYS} are read")
    return {str(name): _check_number(number) for name, number in value.items()}


def _parse_number(text: bytes) -> float:
    try:
        return _check_number(float(text.decode()))
    except (ValueError, UnicodeDecodeError) as error:
        if isinstance(error, BadReward):
            raise
        raise BadReward(f"reward.txt is not a number: {_shorten(text)}") from None


def _check_number(value: object) -> float:
    if not isinstance(value, (int, float)):
        raise BadReward(f"a reward is not a number: {_shorten(repr(value).encode())}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise BadReward(f"a reward is not finite: {value!r:.40}")
    return number


def _shorten(text: bytes) -> str:
    return repr(text[:60].decode(errors="replace"))


def scalar_reward(rewards: Mapping[str, float], key: str = REWARD) -> float:
    """Return the number to train on.

    Raises:
        BadReward: if there is none of that name.
    """
    if key not in rewards:
        names = ", ".join(sorted(rewards)) or "none"
        raise BadReward(f"the tests gave no reward named {key!r}, only {names}")
    return rewards[key]


def falls_short(rewards: Mapping[str, float], least: float | Mapping[str, float] | None) -> bool:
    """Return whether a step's rewards miss ``min_reward``, so that no further step is played."""
    if least is None:
        return False
    thresholds = {REWARD: least} if isinstance(least, (int, float)) else least
    return any(rewards.get(name, -math.inf) < threshold for name, threshold in thresholds.items())


def combine_steps(
    steps: Sequence[Mapping[str, float]], strategy: Literal["mean", "final"] | None
) -> Rewards:
    """Return the rewards of a task: means over its graded steps, or those of the last."""
    if strategy == "final":
        return dict(steps[-1])
    names = dict.fromkeys(name for rewards in steps for name in rewards)
    return {
        name: math.fsum(rewards.get(name, 0.0) for rewards in steps) / len(steps) for name in names
    }
