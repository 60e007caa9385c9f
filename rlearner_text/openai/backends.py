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
from rlearner_text.tokenizer import CHARS_PER_TOKEN, Tokenizer


class GenerateHandler(Protocol):
    """Samples one choice, and streams it to a listener if the engine can."""

    def __call__(
        self, request: wire.GenerateRequest, listener: TokenListener | None = None, /
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
        answer_store: earlier answers that later requests may reference.
    """

    served_model: ServedModel
    answer_store: AnswerStore

    async def prompts(self, body: GenerationBody) -> list[Sequence[int]]:
        """Return the token ids of each prompt of a request.

        Raises:
            HttpError: if the request is invalid.
        """
        ...

    async def count_tokens(self, body: ChatBody) -> int:
        """Return the number of tokens of a chat's prompt, which is not sampled from.

        Raises:
            HttpError: if the request is invalid.
        """
        ...

    async def handle(
        self, ask: wire.GenerateRequest, listener: TokenListener | None = None, /
    ) -> wire.GenerateReply:
        """Sample one choice; see ``GenerateHandler``.

        Raises:
            HttpError: if it cannot be sampled.
        """
        ...


def refuse_long(body: GenerationBody, max_context_tokens: int) -> None:
    """Refuse a prompt that cannot fit, before it is rendered and encoded, which would take minutes.

    Raises:
        HttpError: if it has too many characters.
    """
    if body.characters > (most := max_context_tokens * CHARS_PER_TOKEN):
        message = (
            f"the prompt has {body.characters} characters, more than {most}, which do not fit into "
        )
        param = "messages" if isinstance(body, ChatBody) else "prompt"
        raise HttpError(
            400,
            f"{message}{max_context_tokens} tokens",
            param=param,
            code="context_length_exceeded",
        )


def refuse_overlong(tokenizer: Tokenizer, text: str, max_context_tokens: int, param: str) -> None:
    """Refuse a text with far too many tokens before all of them are there.

    Raises:
        HttpError: if it certainly has more than the context.
    """
    if tokenizer.exceeds(text, max_context_tokens):
        raise HttpError(
            400,
            f"the prompt has more than {max_context_tokens} tokens",
            param=param,
            code="context_length_exceeded",
        )


class SingleKeyBackend:
    """Renders prompts with the model's own chat template and answers with one engine."""

    def __init__(
        self,
        handle: GenerateHandler,
        tokenizer: Tokenizer,
        served_model: ServedModel,
        answer_store: AnswerStore,
    ) -> None:
        self._handle = handle
        self.served_model = served_model
        self._tokenizer = tokenizer
        self.answer_store = answer_store

    async def handle(
        self, ask: wire.GenerateRequest, listener: TokenListener | None = None, /
    ) -> wire.GenerateReply:
        return await self._handle(ask, listener)

    async def prompts(self, body: GenerationBody) -> list[Sequence[int]]:
        refuse_long(body, self.served_model.max_context_tokens)
        if isinstance(body, ChatBody):
            try:
                return [await asyncio.to_thread(self._encoded, body)]
            except ConfigError as error:
                raise HttpError(400, error.allowed, param="messages") from None
        assert isinstance(body, CompletionBody)
        return [
            await asyncio.to_thread(self._encoded_text, prompt, "prompt")
            if isinstance(prompt, str)
            else prompt
            for prompt in body.prompts()
        ]

    async def count_tokens(self, body: ChatBody) -> int:
        (prompt,) = await self.prompts(body)
        return len(prompt)

    def _encoded(self, body: ChatBody) -> list[int]:
        shield = self._tokenizer.shield
        messages = [shield_values(shield, message.plain()) for message in body.messages]
        tools = shield_values(shield, body.offered)
        return self._encoded_text(self._tokenizer.render_chat(messages, tools=tools), "messages")

    def _encoded_text(self, text: str, param: str) -> list[int]:
        refuse_overlong(self._tokenizer, text, self.served_model.max_context_tokens, param)
        return self._tokenizer.encode(text)
