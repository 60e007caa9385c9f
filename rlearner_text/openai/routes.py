"""The paths of OpenAI's protocol that generate: chats, completions and responses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from aiohttp import web

from rlearner_text.openai.answer_store import Item
from rlearner_text.openai.connections import backend_of, read_json
from rlearner_text.openai.generation import generate
from rlearner_text.openai.request_bodies import (
    COMPLETION_TOKENS,
    LONG_BODY,
    ChatBody,
    CompletionBody,
)
from rlearner_text.openai.response_events import ResponsesFormat
from rlearner_text.openai.responses import ResponsesBody, chat_of, items_of
from rlearner_text.openai.sse_chunks import ChatFormat
from rlearner_text.tokenizer import Tokenizer


class OpenAIRoutes:
    """Handlers of /v1/chat/completions, /v1/completions and /v1/responses."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Add the paths to an application."""
        router.add_post("/v1/chat/completions", self._chat)
        router.add_post("/v1/completions", self._completions)
        router.add_post("/v1/responses", self._responses)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body, _ = await read_json(request, ChatBody)
        return await generate(
            request,
            backend_of(request),
            self._tokenizer,
            body=body,
            limit=body.max_completion_tokens or body.max_tokens,
            form=partial(ChatFormat, body, self._tokenizer),
        )

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body, _ = await read_json(request, CompletionBody)
        return await generate(
            request,
            backend_of(request),
            self._tokenizer,
            body=body,
            limit=body.max_tokens or COMPLETION_TOKENS,
            form=partial(ChatFormat, body, self._tokenizer),
        )

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        backend = backend_of(request)
        body, size = await read_json(request, ResponsesBody)
        items = items_of(body, backend.answer_store)
        if size < LONG_BODY:
            chat = chat_of(body, items)
        else:
            chat = await asyncio.to_thread(chat_of, body, items)

        def keep(response_id: str, output: Sequence[Item]) -> None:
            if body.store:
                backend.answer_store.add(response_id, items, output, size)

        return await generate(
            request,
            backend,
            self._tokenizer,
            body=chat,
            limit=body.max_output_tokens or body.max_tokens,
            form=partial(ResponsesFormat, body, chat, self._tokenizer, keep),
        )
