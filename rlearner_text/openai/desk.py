"""Who answers whom: what a desk is to the server, and the one of a server that has one engine and one key."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from broker.contract import wire
from broker.errors import ConfigError
from rlearner_text.openai.bodies import Body, ChatBody, CompletionBody
from rlearner_text.openai.kept import Kept
from rlearner_text.openai.pieces import Tap
from rlearner_text.openai.problems import Problem
from rlearner_text.tokenizer import Tokenizer


class Handle(Protocol):
    """Samples one choice, and tells a tap of it meanwhile where the engine can; else the tap hears nothing."""

    def __call__(self, request: wire.GenerateRequest, tap: Tap | None = None, /) -> Awaitable[wire.GenerateReply]: ...


@dataclass(frozen=True)
class Served:
    """What is served.

    Attributes:
        model: its name for clients: the policy.
        path: folder or hub name it was loaded from; clients may name it so, too.
        max_context_tokens: prompt and output together.
        state: ``serving``, or why not yet or no more.
        policy_version: newest version held.
        any_model: whether a client may name whatever model it likes, and gets this one.
        top_logprobs: whether the likeliest tokens at each place can be told.
    """

    model: str
    path: str
    max_context_tokens: int
    state: Callable[[], str]
    policy_version: Callable[[], int]
    any_model: bool = False
    top_logprobs: bool = False


class Desk(Protocol):
    """Answers the holder of a certain key.

    Attributes:
        kept: the answers that its later requests may refer to.
    """

    served: Served
    kept: Kept

    async def prompts(self, body: Body) -> list[Sequence[int]]:
        """The token ids of each prompt of a request.

        Raises:
            Problem: it cannot be asked so.
        """
        ...

    async def handle(self, ask: wire.GenerateRequest, tap: Tap | None = None, /) -> wire.GenerateReply:
        """Samples one choice; see ``Handle``.

        Raises:
            Problem: it cannot be had.
        """
        ...


class OneDesk:
    """Prompts by the model's own chat template, answered by one engine.

    Args:
        handle: samples one choice.
    """

    def __init__(self, handle: Handle, tokenizer: Tokenizer, served: Served) -> None:
        self._handle, self.served, self._tokenizer = handle, served, tokenizer
        self.kept = Kept()

    async def handle(self, ask: wire.GenerateRequest, tap: Tap | None = None, /) -> wire.GenerateReply:
        return await self._handle(ask, tap)

    async def prompts(self, body: Body) -> list[Sequence[int]]:
        if isinstance(body, ChatBody):
            try:
                return [await asyncio.to_thread(self._encoded, body)]
            except ConfigError as error:
                raise Problem(400, error.allowed, param="messages") from None
        assert isinstance(body, CompletionBody)
        return [await asyncio.to_thread(self._tokenizer.encode, one) if isinstance(one, str) else one for one in body.prompts()]

    def _encoded(self, body: ChatBody) -> list[int]:
        return self._tokenizer.encode(self._tokenizer.render_chat([one.plain() for one in body.messages], tools=body.offered))
