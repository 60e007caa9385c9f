"""Checks what an environment returned before it is used: types, finite numbers, sizes.

Errors name the method and what it returned. Numbers of numpy and the like become plain ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from broker.contract.strict import text_problem
from broker.errors import RlearnerError
from envhub.envs.base import Observation, StepResult
from envhub.envs.plain_row import BadRowError, plain_row

# of one observation, anchor or frame: about 250,000 tokens
MAX_TEXT_BYTES: Final = 1 << 20
MAX_METRICS: Final = 256
MAX_ACTIONS: Final = 4096
FLAGS: Final = ("done", "valid", "success", "truncated")
NAME_CHARS: Final = 100


class ReturnedValueError(RlearnerError):
    """A method returned something invalid."""


def observation(method: str, value: object) -> Observation:
    """Return the value if it is an observation.

    Raises:
        ReturnedValueError: if it is not; says why.
    """
    if not isinstance(value, Observation):
        raise ReturnedValueError(f"{method} returned {type(value).__name__}, not an Observation")
    text(f"{method} returned an Observation whose text", value.text)
    text(f"{method} returned an Observation whose anchor", value.anchor, limit=8 * MAX_TEXT_BYTES)
    if value.history:
        _check_history(method, value.history)
    if value.seat or value.actions:
        text(f"{method} returned an Observation whose seat", value.seat)
        _check_texts(f"{method} returned an Observation whose actions", value.actions)
    return value


def _check_texts(label: str, values: object) -> tuple[str, ...]:
    if not isinstance(values, list | tuple) or len(values) > MAX_ACTIONS:
        raise ReturnedValueError(f"{label} are no list of at most {MAX_ACTIONS} texts")
    return tuple(text(f"{label} contain", value) for value in values)


def _check_history(method: str, history: object) -> None:
    """Check that messages are a system message, if any, and pairs of user and assistant."""
    messages = list(history) if isinstance(history, list | tuple) else [None]
    pairs = [list(item) for item in messages if isinstance(item, list | tuple) and len(item) == 2]
    if len(pairs) < len(messages):
        raise ReturnedValueError(f"{method} returned a history that is not of (role, content)")
    for _, content in pairs:
        text(f"{method} returned a history whose message", content)
    roles = [role for role, _ in pairs]
    turns = roles[roles[0] == "system" :]
    if turns != ["user", "assistant"] * (len(turns) // 2):
        expected = "perhaps a system message, then user and assistant"
        raise ReturnedValueError(f"{method} returned a history of {roles}, not {expected}")


def step_result(value: object, method: str = "step") -> StepResult:
    """Return the value with plain numbers if it is the result of a step (or of another method).

    Raises:
        ReturnedValueError: if it is not; says why.
    """
    if not isinstance(value, StepResult):
        raise ReturnedValueError(f"{method} returned {type(value).__name__}, not a StepResult")
    observation(method, value.observation)
    flags = (value.done, value.valid, value.success, value.truncated)
    # nearly every result: nothing needs to be converted, and this runs at every step
    is_plain = type(flags[0]) is type(flags[1]) is type(flags[2]) is type(flags[3]) is bool
    has_more = (
        type(value.metrics) is not dict
        or bool(value.metrics)
        or bool(value.seat_rewards)
        or bool(value.seat_successes)
    )
    if is_plain and type(value.reward) is float and not has_more:
        _check_finite("reward", value.reward)
        return value
    is_done, is_valid, is_success, is_truncated = (
        _check_flag(name, flag) for name, flag in zip(FLAGS, flags, strict=True)
    )
    return StepResult(
        value.observation,
        _check_number("reward", value.reward),
        is_done,
        valid=is_valid,
        success=is_success,
        truncated=is_truncated,
        metrics=_check_metrics(value.metrics),
        seat_rewards=_check_metrics(value.seat_rewards, "seat reward"),
        seat_successes=_check_texts(f"{method} returned seat_successes that", value.seat_successes),
    )


def text(label: str, value: object, *, limit: int = MAX_TEXT_BYTES) -> str:
    """Return the value if it is a text that can be sent.

    Raises:
        ReturnedValueError: if it is not a text, has lone surrogates, or is larger than ``limit``
            bytes; names it as ``label``.
    """
    if not isinstance(value, str):
        raise ReturnedValueError(f"{label} is {_short_repr(value)}, not a text")
    if problem := text_problem(value):
        raise ReturnedValueError(f"{label} is {problem}")
    size = len(value) if value.isascii() else len(value.encode())
    if size > limit:
        raise ReturnedValueError(f"{label} has {size} bytes, the limit is {limit}")
    return value


def row(label: str, value: object) -> dict[str, Any]:
    """Return the value as plain JSON values if it is a row.

    Raises:
        ReturnedValueError: if it is not a mapping that JSON can express, or is too large; names it
            as ``label``.
    """
    if not value and isinstance(value, Mapping):
        return {}
    try:
        return plain_row(value)
    except BadRowError as error:
        raise ReturnedValueError(f"{label} is {error}") from None


def _check_metrics(value: object, noun: str = "metric") -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise ReturnedValueError(
            f"step returned {noun}s {_short_repr(value)}, not a mapping of names to numbers"
        )
    if len(value) > MAX_METRICS:
        raise ReturnedValueError(f"step returned {len(value)} {noun}s, the limit is {MAX_METRICS}")
    for name in value:
        if not isinstance(name, str) or not 0 < len(name) <= NAME_CHARS or not name.isprintable():
            allowed = f"a name is a text of 1-{NAME_CHARS} printable characters"
            raise ReturnedValueError(f"step returned a {noun} named {_short_repr(name)}; {allowed}")
    return {str(name): _check_number(f"{noun} {name!r}", number) for name, number in value.items()}


def _check_number(label: str, value: Any) -> float:
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise ReturnedValueError(f"step returned {label} {_short_repr(value)}, not a number")
    try:
        number = float(value)
    except Exception:  # noqa: BLE001 - a user's object may raise anything
        raise ReturnedValueError(
            f"step returned {label} {_short_repr(value)}, not a number"
        ) from None
    _check_finite(label, number)
    return number


def _check_finite(label: str, number: float) -> None:
    if not math.isfinite(number):
        raise ReturnedValueError(f"step returned {label} {number}; it must be finite")


def _check_flag(name: str, value: Any) -> bool:
    # numpy's, without an import
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
        return bool(value)
    raise ReturnedValueError(f"step returned {name} {_short_repr(value)}, not True or False")


def _short_repr(value: object) -> str:
    try:
        line = " ".join(repr(value)[:200].split())
    except Exception as error:  # noqa: BLE001 - a user's object may raise anything
        line = f"that cannot be shown: {type(error).__name__}"
    return f"{type(value).__name__} {line if len(line) <= 80 else line[:77] + '...'}"
