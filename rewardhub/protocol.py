"""Messages between a reward hub and its processes: MessagePack in frames.

``broker.system.workers.line`` reads and writes the frames.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec.msgpack import Decoder

from rewardhub.rewards.base import Sample


class LoadRewardRequest(msgspec.Struct, frozen=True, tag=True):
    """Request to load a reward; answered by ScoreReply or ScoreFailureReply."""

    name: str
    args: dict[str, Any]


class ScoreRequest(msgspec.Struct, frozen=True, tag=True):
    """Request to score one sample; answered by ScoreReply or ScoreFailureReply."""

    name: str
    args: dict[str, Any]
    sample: Sample


class ScoreReply(msgspec.Struct, frozen=True, tag=True):
    """Reply with the value: a number or one for each part or turn; None for LoadRewardRequest."""

    value: float | dict[str, float] | list[float] | None
    is_spent: bool = False  # the worker has used much of its memory and should be replaced
    notes: dict[str, float] = {}  # see ``rewardhub.rewards.base.Scored``


class ScoreFailureReply(msgspec.Struct, frozen=True, tag=True):
    """Reply without a value. ``retry``: whether another try may succeed."""

    detail: str
    retry: bool
    is_spent: bool = False  # as in ScoreReply
    trace: str = ""  # traceback of the reward, for the hub's log


# ---------------------------------------------------------------------------- processes that score
# many samples at once


class NumberedRequest(msgspec.Struct, frozen=True, tag=True):
    """A numbered request."""

    number: int
    content: LoadRewardRequest | ScoreRequest


class CancelScoreRequest(msgspec.Struct, frozen=True, tag=True):
    """Cancellation of a numbered request."""

    number: int


class NumberedReply(msgspec.Struct, frozen=True):
    """The answer to a numbered request."""

    number: int
    content: ScoreReply | ScoreFailureReply


_CALLS: Final[Decoder[NumberedRequest | CancelScoreRequest]] = Decoder(
    NumberedRequest | CancelScoreRequest
)
_ANSWERED: Final[msgspec.msgpack.Decoder[NumberedReply]] = msgspec.msgpack.Decoder(NumberedReply)

_ENCODER: Final = msgspec.msgpack.Encoder()
_REQUESTS: Final[Decoder[LoadRewardRequest | ScoreRequest]] = Decoder(
    LoadRewardRequest | ScoreRequest
)
_ANSWERS: Final[Decoder[ScoreReply | ScoreFailureReply]] = Decoder(ScoreReply | ScoreFailureReply)


def encode_message(
    message: LoadRewardRequest
    | ScoreRequest
    | ScoreReply
    | ScoreFailureReply
    | NumberedRequest
    | CancelScoreRequest
    | NumberedReply,
) -> bytes:
    return _ENCODER.encode(message)


def decode_request(data: bytes) -> LoadRewardRequest | ScoreRequest:
    return _REQUESTS.decode(data)


def decode_reply(data: bytes) -> ScoreReply | ScoreFailureReply:
    """Decode a worker's answer.

    Raises:
        msgspec.DecodeError: if it is not an answer.
    """
    return _ANSWERS.decode(data)


def decode_numbered_request(data: bytes) -> NumberedRequest | CancelScoreRequest:
    """Decode a hub's numbered request or cancellation."""
    return _CALLS.decode(data)


def decode_numbered_reply(data: bytes) -> NumberedReply:
    """Decode the answer to a numbered request.

    Raises:
        msgspec.DecodeError: if it is not an answer.
    """
    return _ANSWERED.decode(data)
