"""The interface of rewards: the sample that a reward gets, and the values that it may return."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar, Final, Protocol

import msgspec

from broker.settings.config import Section

# A number, or the number of each part or of each turn; these add up to the reward.
Value = float | dict[str, float] | list[float]


class Scored(msgspec.Struct, frozen=True):
    """A reward with notes: numbers that are shown but not part of it."""

    value: Value
    notes: dict[str, float] = {}  # by name; shown as ``<reward>/<name>``


class SampleTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of the policy."""

    message: int  # index of its message among the sample's messages
    reward: float  # from the environment, and from rewards of earlier pools with a score per turn
    valid: bool  # whether the text parsed to an action
    num_tokens: int  # tokens that the policy sampled


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One episode, as a reward sees it."""

    domain: str  # the domain it belongs to
    task_index: int  # which task of the domain
    prompt: str  # the question as text
    response: str  # text of the last sampled turn
    reference: str  # the reference answer, empty if the domain has none
    reward: float  # total reward so far, from the environment and earlier pools
    reward_parts: dict[str, float]  # the parts of it, by name
    success: bool  # whether the environment counts it as solved
    end: str  # why the episode ended: terminated, truncated, timeout, length
    num_turns: int  # turns the policy took in the episode
    num_tokens: int  # tokens the policy sampled in them
    metrics: dict[str, float]  # numbers from the environment
    # The task's row in its data set, as JSON values by column; empty without a data set.
    row: dict[str, Any] = {}
    # The whole conversation in OpenAI's form, with the tool calls and their results.
    messages: list[dict[str, Any]] = []
    turns: list[SampleTurn] = []  # of the policy, in order
    max_turns: int = 1  # that an episode of the domain may have


Score = Callable[[Sample], object]


class RewardProtocol(Protocol):
    """A reward of the registry. Each worker process has one instance and scores one sample at once.

    A class of the registry with ``concurrent = True`` runs in a separate process (on each GPU with
    ``on_gpu = True``) and scores many samples at once: ``score`` is a coroutine, and ``Args`` has
    ``max_concurrency`` and ``timeout_s``, which replaces ``rewardhub.timeout_s``. A classmethod
    ``concurrent_section(args)`` instead returns the section that has these two, or None if with
    these arguments one sample at a time is scored. An optional ``start`` is awaited once before.

    Two optional classmethods reject bad input before anything starts: ``check(args)`` by a
    ``ConfigError`` with the argument's name as key, and ``check_row(args, row)`` by an
    ``InvalidRowError`` for a row of a data set.
    """

    Args: ClassVar[type[Section]]

    def __init__(self, args: Section) -> None: ...

    def score(self, sample: Sample) -> Value | Scored | Awaitable[Value | Scored]:
        """Return the reward; may be a coroutine. ``rewardhub.timeout_s`` ends the process.

        Raises:
            ResponseFault: if the response is at fault; any other exception is the reward's own
                failure.
        """
        ...


MAX_PARTS: Final = 64
NAME_CHARS: Final = 100


class NoScore(ValueError):
    """There is no score, and another try would not change that. Never a reward of zero."""


class ResponseFault(Exception):
    """The response itself is the reason why it cannot be scored normally.

    The episode gets ``value``, normally the lowest of this reward, and the note; it is not retried,
    and its group stays valid. Any other exception, a timeout of the hub, or the exit of a worker
    process counts as the reward's own failure, which is retried and then voids the group. Call code
    that may not return through ``rewardhub.bounded``.

    Args:
        note: the reason, as the name of a note with the value 1, ``too_costly`` for example.
        value: the reward of the episode.
    """

    def __init__(self, note: str, value: Value) -> None:
        super().__init__(f"{note}: the reward is {value}")
        self.note = note
        self.value = value


class InvalidRowError(NoScore):
    """The task's row lacks what the reward needs, or holds it in another form; says which column
    or argument.
    """


class InvalidScoreError(NoScore):
    """A reward returned something that is not a finite number."""


def check_scored(value: object, num_turns: int) -> Scored:
    """Return a reward's result as plain floats.

    Raises:
        InvalidScoreError: as in ``check_value``; also if the notes are not finite numbers by name.
    """
    if isinstance(value, Scored):
        return Scored(
            check_value(value.value, num_turns),
            _check_numbers(value.notes, "note") if value.notes else {},
        )
    return Scored(check_value(value, num_turns))


def score_of_fault(fault: ResponseFault, num_turns: int) -> Scored:
    """Return the reward of a response that is at fault.

    Raises:
        InvalidScoreError: as in ``check_scored``.
    """
    return check_scored(Scored(fault.value, {fault.note: 1.0}), num_turns)


def check_value(value: object, num_turns: int) -> Value:
    """Return the value as plain floats.

    Args:
        num_turns: turns of the episode.

    Raises:
        InvalidScoreError: if it is neither a finite number, nor a mapping of names to finite
            numbers, nor a list of one finite number for each turn.
    """
    if isinstance(value, Mapping):
        return _check_numbers(value, "part")
    if not isinstance(value, (list, tuple)) and getattr(value, "ndim", 0) != 1:
        return _check_number(value, "the reward")
    scores: list[object] = list(value)  # type: ignore[call-overload]  # also an array
    if len(scores) != num_turns:
        raise InvalidScoreError(
            f"a reward of turns needs a number for each of the {num_turns} turns, got {len(scores)}"
        )
    return [_check_number(score, f"turn {turn}") for turn, score in enumerate(scores)]


def total_value(value: Value) -> float:
    """Return the reward that parts or turns add up to."""
    if isinstance(value, dict):
        return sum(value.values())
    if isinstance(value, list):
        return sum(value)
    return value


def _check_numbers(value: Mapping[Any, object], noun: str) -> dict[str, float]:
    if not value or not all(isinstance(name, str) and name for name in value):
        raise InvalidScoreError(
            f"a reward of {noun}s needs a name for each {noun}, got {_format_value(value)}"
        )
    if len(value) > MAX_PARTS or any(
        len(name) > NAME_CHARS or not name.isprintable() for name in value
    ):
        raise InvalidScoreError(
            f"a reward has at most {MAX_PARTS} {noun}s with printable names of at most "
            f"{NAME_CHARS} characters"
        )
    return {name: _check_number(part, f"{noun} {name!r}") for name, part in value.items()}


def _check_number(value: object, noun: str) -> float:
    # Scalars of numpy and torch are numbers; strings are not, although float() parses them.
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise InvalidScoreError(f"{noun} must be a number, got {_format_value(value)}")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidScoreError(f"{noun} must be a number, got {_format_value(value)}") from None
    if not math.isfinite(number):
        raise InvalidScoreError(f"{noun} must be finite, got {number}")
    return number


def _format_value(value: object) -> str:
    text = " ".join(repr(value).split())
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"
