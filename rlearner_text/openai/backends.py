"""Backend interface of the HTTP server, and the backend with one engine and one key."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from broker.contract import wire
from broker.errors import ConfigError
from rlearner_text.openai.answer_store import AnswerStore
from rlearner_text.openai.http_errors import HttpError
from rlearner_text.openai.request_bodies import ChatBody, CompletionBody, GenerationBody
from rlearner_text.openai.token_events import TokenListener
from rlearner_text.special_text import shield_values
from rlearner_text.tokenizer import Tokenizer


class GenerateHandler(Protocol):
    """Samples one choice, and streams it to a tap if the engine can."""

    def __call__(
        self, request: wire.GenerateRequest, tap: TokenListener | None = None, /
    ) -> Awaitable[wire.GenerateReply]: ...


@dataclass(frozen=True)
class ServedModel:
    """The model served.

    Attributes:
        model: its name for clients: the policy.
        path: folder or hub name of its source; clients may use it as name, too.
        max_context_tokens: prompt and output together.
        state: returns ``serving``, or why the server is not.
        policy_version: returns the newest loaded version.
        any_model: whether requests for any model name get this one.
        top_logprobs: whether the likeliest tokens at each position are available.
    """

    model: str
    path: str
    max_context_tokens: int
    state: Callable[[], str]
    policy_version: Callable[[], int]
    any_model: bool = False
    top_logprobs: bool = False


class ApiBackend(Protocol):
    """Answers the requests with one API key.

    Attributes:
        kept: earlier answers that later requests may reference.
    """

    served: ServedModel
    kept: AnswerStore

    async def prompts(self, body: GenerationBody) -> list[Sequence[int]]:
        """Return the token ids of each prompt of a request.

        Raises:
            HttpError: if the request is invalid.
        """
        ...

    async def handle(self, ask: wire.GenerateRequest, tap: TokenListener | None = None, /) -> wire.GenerateReply:
        """Sample one choice; see ``GenerateHandler``.

        Raises:
            HttpError: if it cannot be sampled.
        """
        ...


class SingleKeyBackend:
    """Renders prompts with the model's own chat template and answers with one engine."""

    def __init__(self, handle: GenerateHandler, tokenizer: Tokenizer, served: ServedModel, kept: AnswerStore) -> None:
        self._handle, self.served, self._tokenizer, self.kept = handle, served, tokenizer, kept

    async def handle(self, ask: wire.GenerateRequest, tap: TokenListener | None = None, /) -> wire.GenerateReply:
        return await self._handle(ask, tap)

    async def prompts(self, body: GenerationBody) -> list[Sequence[int]]:
        if isinstance(body, ChatBody):
            try:
                return [await asyncio.to_thread(self._encoded, body)]
            except ConfigError as error:
                raise HttpError(400, error.allowed, param="messages") from None
        assert isinstance(body, CompletionBody)
        encode = self._tokenizer.encode
        return [await asyncio.to_thread(encode, one) if isinstance(one, str) else one for one in body.prompts()]

    def _encoded(self, body: ChatBody) -> list[int]:
        shield = self._tokenizer.shield
        messages = [shield_values(shield, one.plain()) for one in body.messages]
        tools = shield_values(shield, body.offered)
        return self._tokenizer.encode(self._tokenizer.render_chat(messages, tools=tools))
