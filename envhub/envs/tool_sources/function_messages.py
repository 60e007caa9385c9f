"""What a hub and its process of Python functions send each other."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec.msgpack import Decoder

from envhub.envs.tool_sources.base import ToolResult, ToolSpec


class ListFunctions(msgspec.Struct, frozen=True, tag=True):
    """The first request; answered by FunctionList."""


class CallFunction(msgspec.Struct, frozen=True, tag=True):
    """A call; answered by its ToolResult."""

    name: str
    arguments: dict[str, Any]


class FunctionList(msgspec.Struct, frozen=True):
    """The functions, or why there are none."""

    specs: list[ToolSpec] = []
    problem: str = ""


class FunctionReply(msgspec.Struct, frozen=True):
    """The answer to either request."""

    functions: FunctionList | None = None
    result: ToolResult | None = None


REQUESTS: Final[Decoder[ListFunctions | CallFunction]] = Decoder(ListFunctions | CallFunction)
REPLIES: Final[Decoder[FunctionReply]] = Decoder(FunctionReply)
