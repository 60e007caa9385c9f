"""What a reward sees and what it may answer."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Mapping
from typing import Any, ClassVar, Final, Protocol

import msgspec

from broker.settings.config import Section

Value = float | dict[str, float]  # a number, or the number of each part; parts add up to the reward


class Scored(msgspec.Struct, frozen=True):
    """A reward, and numbers that are shown beside it and count nothing."""

    value: Value
    notes: dict[str, float] = {}  # by name; shown as ``<reward>/<name>``


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One episode, as a reward sees it."""

    domain: str  # the domain it belongs to
    task_index: int  # which task of the domain
    prompt: str  # the question as text
    response: str  # text of the last sampled turn
    reference: str  # the reference answer, empty where the domain has none
    reward: float  # total reward so far: of the environment and of pools visited before
    reward_parts: dict[str, float]  # what each gave, by name
    success: bool  # whether the environment holds it for solved
    end: str  # why the episode ended: terminated, truncated, timeout, length
    num_turns: int  # turns the policy took in the episode
    num_tokens: int  # tokens the policy sampled in them
    metrics: dict[str, float]  # numbers from the environment


class Reward(Protocol):
    """A reward of the registry. One instance lives in each worker process and scores one sample after another.

    A class of the registry with ``concurrent = True`` has one process of its own instead (one on each GPU with ``on_gpu = True``) and
    scores many samples at once: ``score`` is a coroutine, and ``Args`` tell ``max_concurrency`` and ``timeout_s``, which replaces
    ``rewardhub.timeout_s``. ``start``, if there is one, is awaited once before. A classmethod ``check(args)``, if there is one, refuses
    arguments that cannot work before anything starts: by a ``ConfigError`` with the argument's name as key.
    """

    Args: ClassVar[type[Section]]

    def __init__(self, args: Section) -> None: ...

    def score(self, sample: Sample) -> Value | Scored | Awaitable[Value | Scored]:
        """The reward; may be a coroutine. Runs in a process that is killed when it takes longer than ``rewardhub.timeout_s``.

        Raises:
            ResponseFault: the response is to blame; any other exception is the reward's own failure.
        """
        ...


MAX_PARTS: Final = 64
NAME_CHARS: Final = 100


class NoScore(ValueError):
    """There is no score, and another try would not change that; says why. Never a reward of zero."""


class ResponseFault(Exception):
    """The response is to blame that it cannot be scored as others are. This, and nothing else, tells the hub whose fault a failure is.

    The episode gets ``value``, normally the lowest of this reward, and the note: it is not retried, and its group is not void. Every other
    exception, a timeout of the hub and the end of a worker process are the reward's own failures, which are retried and then void the
    group. A reward that gives responses to code that may not return calls it through ``rewardhub.bounded``.

    Args:
        note: why, as the name of a note with the value 1, ``too_costly`` for example.
        value: the reward of the episode.
    """

    def __init__(self, note: str, value: Value) -> None:
        super().__init__(f"{note}: the reward is {value}")
        self.note, self.value = note, value


class InvalidValue(NoScore):
    """A reward answered something that is no finite number."""


def check_scored(value: object) -> Scored:
    """What a reward answered, as plain floats.

    Raises:
        InvalidValue: see ``check_value``; the notes must be finite numbers with names, too.
    """
    if isinstance(value, Scored):
        return Scored(check_value(value.value), _numbers(value.notes, "note") if value.notes else {})
    return Scored(check_value(value))


def blamed(fault: ResponseFault) -> Scored:
    """What a response gets that is to blame.

    Raises:
        InvalidValue: as ``check_scored``.
    """
    return check_scored(Scored(fault.value, {fault.note: 1.0}))


def check_value(value: object) -> Value:
    """The value as plain floats.

    Raises:
        InvalidValue: neither a finite number nor a mapping of names to finite numbers; says what it was.
    """
    if isinstance(value, Mapping):
        return _numbers(value, "part")
    return _number(value, "the reward")


def _numbers(value: Mapping[Any, object], what: str) -> dict[str, float]:
    if not value or not all(isinstance(name, str) and name for name in value):
        raise InvalidValue(f"a reward of {what}s needs a name for each {what}, got {_show(value)}")
    if len(value) > MAX_PARTS or any(len(name) > NAME_CHARS or not name.isprintable() for name in value):
        raise InvalidValue(f"a reward has at most {MAX_PARTS} {what}s with printable names of at most {NAME_CHARS} characters")
    return {name: _number(part, f"{what} {name!r}") for name, part in value.items()}


def _number(value: object, what: str) -> float:
    # numpy's and torch's scalars count, texts do not although float() would read them.
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise InvalidValue(f"{what} must be a number, got {_show(value)}")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidValue(f"{what} must be a number, got {_show(value)}") from None
    if not math.isfinite(number):
        raise InvalidValue(f"{what} must be finite, got {number}")
    return number


def _show(value: object) -> str:
    text = " ".join(repr(value).split())
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"
