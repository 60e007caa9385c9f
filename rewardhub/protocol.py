"""What a reward hub and its worker processes say to each other: MessagePack, never a pickle, in the frames of
``broker.system.workers``."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from rewardhub.rewards.base import Sample


class Load(msgspec.Struct, frozen=True, tag=True):
    """Make a reward ready; answered by Done or Failed."""

    name: str
    args: dict[str, Any]


class Score(msgspec.Struct, frozen=True, tag=True):
    """Score one sample; answered by Done or Failed."""

    name: str
    args: dict[str, Any]
    sample: Sample


class Done(msgspec.Struct, frozen=True, tag=True):
    """The value: a number or the number of each part; None in answer to Load."""

    value: float | dict[str, float] | None
    spent: bool = False  # the worker has used much of its memory and should be replaced
    notes: dict[str, float] = {}  # see ``rewardhub.rewards.base.Scored``


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Why there is no value. ``retry``: another try may go better."""

    detail: str
    retry: bool
    spent: bool = False  # as in Done
    trace: str = ""  # of what the reward raised, for the hub's log


# ------------------------------------------------------------------------ a hub and a process that scores many at once


class Asked(msgspec.Struct, frozen=True, tag=True):
    """A question under a number."""

    number: int
    what: Load | Score


class Dropped(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits for that answer any more."""

    number: int


class Answered(msgspec.Struct, frozen=True):
    """The answer to the question of that number."""

    number: int
    what: Done | Failed


_CALLS: Final[msgspec.msgpack.Decoder[Asked | Dropped]] = msgspec.msgpack.Decoder(Asked | Dropped)
_ANSWERED: Final[msgspec.msgpack.Decoder[Answered]] = msgspec.msgpack.Decoder(Answered)

_ENCODER: Final = msgspec.msgpack.Encoder()
_REQUESTS: Final[msgspec.msgpack.Decoder[Load | Score]] = msgspec.msgpack.Decoder(Load | Score)
_ANSWERS: Final[msgspec.msgpack.Decoder[Done | Failed]] = msgspec.msgpack.Decoder(Done | Failed)


def encoded(message: Load | Score | Done | Failed | Asked | Dropped | Answered) -> bytes:
    """One message."""
    return _ENCODER.encode(message)


def request(data: bytes) -> Load | Score:
    """Decode what a hub asks."""
    return _REQUESTS.decode(data)


def answer(data: bytes) -> Done | Failed:
    """Decode what a worker answers.

    Raises:
        msgspec.DecodeError: it is no answer.
    """
    return _ANSWERS.decode(data)


def call(data: bytes) -> Asked | Dropped:
    """Decode what a hub asks a process that scores many at once."""
    return _CALLS.decode(data)


def answered(data: bytes) -> Answered:
    """Decode what such a process answers.

    Raises:
        msgspec.DecodeError: it is no answer.
    """
    return _ANSWERED.decode(data)
