"""Streams an answer as server-sent events, as fast as the engine samples and the client reads.

The engine never waits for the client. Tokens that arrive while the client reads a chunk are
buffered, at most the request's limit, and sent in the next chunk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import msgspec
from aiohttp import web

from rlearner_text.openai.answers import AnswerChoice
from rlearner_text.openai.http_errors import HttpError
from rlearner_text.openai.token_events import TokenEvent, TokenListener

HEADERS: Final = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
# runs once per token; twenty times as fast as the standard library's
encode: Final = msgspec.json.Encoder().encode


class TokenBuffer:
    """Buffer of one choice's unsent pieces; sets ``has_tokens`` when there are some."""

    def __init__(self, has_tokens: asyncio.Event, top_logprobs: int) -> None:
        self._has_tokens = has_tokens
        self._pieces: list[TokenEvent] = []
        self.listener = TokenListener(self._add_piece, top_logprobs)

    def take(self) -> list[TokenEvent]:
        pieces = self._pieces
        self._pieces = []
        return pieces

    def _add_piece(self, piece: TokenEvent) -> None:
        self._pieces.append(piece)
        self._has_tokens.set()


class ChoiceEvents(Protocol):
    """The events of one choice: JSON objects; ``type``, if present, names the event."""

    def of(self, pieces: Sequence[TokenEvent]) -> list[dict[str, Any]]:
        """Return the events of new pieces."""
        ...

    def last(self, choice: AnswerChoice) -> list[dict[str, Any]]:
        """Return the events of the rest of a finished choice and of its end."""
        ...


class EventStream:
    """One streamed answer; ``ending`` returns the data of the events after all choices."""

    def __init__(
        self,
        feeds: Sequence[TokenBuffer],
        tasks: Sequence[asyncio.Task[AnswerChoice]],
        chunks: Sequence[ChoiceEvents],
        ending: Callable[[Sequence[AnswerChoice]], list[bytes]],
        has_tokens: asyncio.Event,
    ) -> None:
        self._ending = ending
        self._open = list(zip(feeds, tasks, chunks, strict=True))
        self._choices: list[AnswerChoice] = []
        self._has_tokens = has_tokens
        self._response = web.StreamResponse(headers=HEADERS)
        for task in tasks:
            task.add_done_callback(lambda _: has_tokens.set())

    async def send(self, request: web.Request) -> web.StreamResponse:
        """Send the answer from the first token on; a request that fails earlier gets a status.

        Raises:
            HttpError: if the request fails before the first event.
        """
        try:
            while self._open:
                await self._has_tokens.wait()
                self._has_tokens.clear()
                for stream in list(self._open):
                    await self._forward(request, *stream)
        except HttpError as problem:
            if not self._response.prepared:
                raise
            # the status is already sent; this ends the stream
            await self._event(request, problem.body)
            return self._response
        for data in self._ending(self._choices):
            await self._response.write(b"data: " + data + b"\n\n")
        await self._response.write_eof()
        return self._response

    async def _forward(
        self,
        request: web.Request,
        feed: TokenBuffer,
        task: asyncio.Task[AnswerChoice],
        chunks: ChoiceEvents,
    ) -> None:
        # Read first: all pieces arrive before the task ends.
        has_ended = task.done()
        if pieces := feed.take():
            for chunk in chunks.of(pieces):
                await self._event(request, chunk)
        if has_ended:
            self._open.remove((feed, task, chunks))
            choice = task.result()
            for chunk in chunks.last(choice):
                await self._event(request, chunk)
            self._choices.append(choice)

    async def _event(self, request: web.Request, value: dict[str, Any]) -> None:
        if not self._response.prepared:
            await self._response.prepare(request)
        name = f"event: {value['type']}\n".encode() if "type" in value else b""
        await self._response.write(name + b"data: " + encode(value) + b"\n\n")
