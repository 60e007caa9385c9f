"""The paths of Anthropic's protocol: messages, the count of their tokens, the form of models."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from functools import partial
from typing import Any

from aiohttp import web

from rlearner_text.anthropic.message_events import MessagesFormat
from rlearner_text.anthropic.messages import MessagesBody, MessagesChat, PromptBody, chat_of
from rlearner_text.openai.backends import ServedModel
from rlearner_text.openai.connections import backend_of, read_json
from rlearner_text.openai.generation import generate
from rlearner_text.openai.request_bodies import LONG_BODY
from rlearner_text.template_rules import takes_late_system
from rlearner_text.tokenizer import Tokenizer


class AnthropicRoutes:
    """Handlers of /v1/messages and /v1/messages/count_tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Add the paths to an application."""
        router.add_post("/v1/messages", self._messages)
        router.add_post("/v1/messages/count_tokens", self._count_tokens)

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        body, size = await read_json(request, MessagesBody)
        chat = await self._convert(body, size)
        return await generate(
            request,
            backend_of(request),
            self._tokenizer,
            body=chat,
            limit=body.max_tokens,
            form=partial(MessagesFormat, body, chat, self._tokenizer),
        )

    async def _count_tokens(self, request: web.Request) -> web.Response:
        body, size = await read_json(request, PromptBody)
        chat = await self._convert(body, size)
        count = await backend_of(request).count_tokens(chat)
        return web.json_response({"input_tokens": count})

    async def _convert(self, body: PromptBody, size: int) -> MessagesChat:
        late_system = takes_late_system(self._tokenizer)
        if size < LONG_BODY:
            return chat_of(body, late_system=late_system)
        return await asyncio.to_thread(chat_of, body, late_system=late_system)


def describe_model(served_model: ServedModel, created: int) -> dict[str, Any]:
    """Return a model as /v1/models lists it."""
    return {
        "type": "model",
        "id": served_model.model,
        "display_name": served_model.model,
        "created_at": datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
