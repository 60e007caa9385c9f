"""Streams an answer as server-sent events, as fast as the engine samples and the client reads.

The engine never waits for the client. Tokens that arrive while the client reads a chunk are
buffered, at most the request's limit, and sent in the next chunk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final, Protocol

import msgspec
from aiohttp import web

from rlearner_text.openai.answers import AnswerChoice
from rlearner_text.openai.http_errors import HttpError
from rlearner_text.openai.token_events import TokenEvent, TokenListener

# seconds without a token until a stream is kept alive, if its protocol has an event for that
PING_S: Final = 15.0
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


class AnswerFormat(Protocol):
    """The format of an answer."""

    @property
    def idle_event(self) -> dict[str, Any] | None:
        """The event that keeps a stream alive; None if the protocol has none."""
        ...

    def whole(self, choices: Sequence[AnswerChoice]) -> dict[str, Any]:
        """Return the answer in one piece."""
        ...

    def events(self, index: int, prompt: Sequence[int]) -> ChoiceEvents:
        """Return the stream events of one choice."""
        ...

    def ending(self, choices: Sequence[AnswerChoice]) -> list[bytes]:
        """Return the data of the events after those of all choices."""
        ...

    def error(self, problem: HttpError) -> dict[str, Any]:
        """Return the event that ends a stream which has begun."""
        ...


class EventStream:
    """One streamed answer."""

    def __init__(
        self,
        feeds: Sequence[TokenBuffer],
        tasks: Sequence[asyncio.Task[AnswerChoice]],
        chunks: Sequence[ChoiceEvents],
        form: AnswerFormat,
        has_tokens: asyncio.Event,
    ) -> None:
        self._form = form
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
                await self._wait_tokens(request)
                for stream in list(self._open):
                    await self._forward(request, *stream)
        except HttpError as problem:
            if not self._response.prepared:
                raise
            # the status is already sent; this ends the stream
            await self._event(request, self._form.error(problem))
            return self._response
        for data in self._form.ending(self._choices):
            await self._response.write(b"data: " + data + b"\n\n")
        await self._response.write_eof()
        return self._response

    async def _wait_tokens(self, request: web.Request) -> None:
        """Wait for tokens or an end, and keep a stream that has begun alive."""
        while not self._has_tokens.is_set():
            if self._form.idle_event is None or not self._response.prepared:
                await self._has_tokens.wait()
                break
            try:
                async with asyncio.timeout(PING_S):
                    await self._has_tokens.wait()
            except TimeoutError:
                await self._event(request, self._form.idle_event)
        self._has_tokens.clear()

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
