"""Messages between a reward hub and its processes: the content of calls and their answers."""

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
    notes: dict[str, float] = {}  # see ``rewardhub.rewards.base.Scored``


class ScoreFailureReply(msgspec.Struct, frozen=True, tag=True):
    """Reply without a value. ``retry``: whether another try may succeed."""

    detail: str
    retry: bool
    trace: str = ""  # traceback of the reward, for the hub's log


RewardRequest = LoadRewardRequest | ScoreRequest
RewardReply = ScoreReply | ScoreFailureReply

REQUESTS: Final[Decoder[RewardRequest]] = Decoder(RewardRequest)
REPLIES: Final[Decoder[RewardReply]] = Decoder(RewardReply)
