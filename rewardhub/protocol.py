"""Messages between a reward hub and its processes, MessagePack in ``broker.system.workers`` frames."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from rewardhub.rewards.base import Sample


class Load(msgspec.Struct, frozen=True, tag=True):
    """Request to load a reward; answered by Done or Failed."""

    name: str
    args: dict[str, Any]


class Score(msgspec.Struct, frozen=True, tag=True):
    """Request to score one sample; answered by Done or Failed."""

    name: str
    args: dict[str, Any]
    sample: Sample


class Done(msgspec.Struct, frozen=True, tag=True):
    """Reply with the value: a number or one for each part; None for Load."""

    value: float | dict[str, float] | None
    spent: bool = False  # the worker has used much of its memory and should be replaced
    notes: dict[str, float] = {}  # see ``rewardhub.rewards.base.Scored``


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Reply without a value. ``retry``: whether another try may succeed."""

    detail: str
    retry: bool
    spent: bool = False  # as in Done
    trace: str = ""  # traceback of the reward, for the hub's log


# ---------------------------------------------------------------------------- processes that score many samples at once


class Asked(msgspec.Struct, frozen=True, tag=True):
    """A numbered request."""

    number: int
    what: Load | Score


class Dropped(msgspec.Struct, frozen=True, tag=True):
    """Cancellation of a numbered request."""

    number: int


class Answered(msgspec.Struct, frozen=True):
    """The answer to a numbered request."""

    number: int
    what: Done | Failed


_CALLS: Final[msgspec.msgpack.Decoder[Asked | Dropped]] = msgspec.msgpack.Decoder(Asked | Dropped)
_ANSWERED: Final[msgspec.msgpack.Decoder[Answered]] = msgspec.msgpack.Decoder(Answered)

_ENCODER: Final = msgspec.msgpack.Encoder()
_REQUESTS: Final[msgspec.msgpack.Decoder[Load | Score]] = msgspec.msgpack.Decoder(Load | Score)
_ANSWERS: Final[msgspec.msgpack.Decoder[Done | Failed]] = msgspec.msgpack.Decoder(Done | Failed)


def encoded(message: Load | Score | Done | Failed | Asked | Dropped | Answered) -> bytes:
    """Encode a message."""
    return _ENCODER.encode(message)


def request(data: bytes) -> Load | Score:
    """Decode a hub's request."""
    return _REQUESTS.decode(data)


def answer(data: bytes) -> Done | Failed:
    """Decode a worker's answer.

    Raises:
        msgspec.DecodeError: if it is not an answer.
    """
    return _ANSWERS.decode(data)


def call(data: bytes) -> Asked | Dropped:
    """Decode a hub's numbered request or cancellation."""
    return _CALLS.decode(data)


def answered(data: bytes) -> Answered:
    """Decode the answer to a numbered request.

    Raises:
        msgspec.DecodeError: if it is not an answer.
    """
    return _ANSWERED.decode(data)
