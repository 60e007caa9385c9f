"""Server-sent events of one request: what its engine tells of goes out as it comes, and as fast as the client reads.

The engine never waits. What it tells of meanwhile is kept here, at most the tokens that the request may have, and goes out in one chunk
when the client has read the one before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from aiohttp import web

from text.openai.bodies import Body
from text.openai.chunks import Chunks, usage_chunk
from text.openai.pieces import Piece, Tap
from text.openai.problems import Problem
from text.openai.replies import Choice, Writer

HEADERS: Final = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
_json: Final = msgspec.json.Encoder()  # twenty times as fast as the standard library's, once for each token


class Feed:
    """What was told of one choice and not been sent.

    Args:
        news: set whenever there is something to send.
    """

    def __init__(self, news: asyncio.Event, top_logprobs: int) -> None:
        self._news = news
        self._pieces: list[Piece] = []
        self.tap = Tap(self._told, top_logprobs)

    def take(self) -> list[Piece]:
        taken, self._pieces = self._pieces, []
        return taken

    def _told(self, piece: Piece) -> None:
        self._pieces.append(piece)
        self._news.set()


class Stream:
    """One streamed answer.

    Args:
        feeds, tasks, chunks: of each choice.
        news: as the feeds have it.
    """

    def __init__(
        self, body: Body, writer: Writer, feeds: Sequence[Feed], tasks: Sequence[asyncio.Task[Choice]], chunks: Sequence[Chunks],
        news: asyncio.Event,
    ) -> None:  # fmt: skip
        self._body, self._writer = body, writer
        self._open = list(zip(feeds, tasks, chunks, strict=True))
        self._choices: list[Choice] = []
        self._news = news
        self._response = web.StreamResponse(headers=HEADERS)
        for task in tasks:
            task.add_done_callback(lambda _: news.set())

    async def send(self, request: web.Request) -> web.StreamResponse:
        """The answer, to its end. It begins with the first token, so that a request that fails at once has its status.

        Raises:
            Problem: before anything was sent.
        """
        try:
            while self._open:
                await self._news.wait()
                self._news.clear()
                for each in list(self._open):
                    await self._forward(request, *each)
        except Problem as problem:
            if not self._response.prepared:
                raise
            await self._event(request, problem.body)  # the status is sent; there is no [DONE] behind it
            return self._response
        if self._body.stream_options.include_usage:
            await self._event(request, usage_chunk(self._writer, self._body, self._choices))
        await self._response.write(b"data: [DONE]\n\n")
        await self._response.write_eof()
        return self._response

    async def _forward(self, request: web.Request, feed: Feed, task: asyncio.Task[Choice], chunks: Chunks) -> None:
        ended = task.done()  # asked first: all is told before the task ends
        if pieces := feed.take():
            await self._event(request, chunks.of(pieces))
        if ended:
            self._open.remove((feed, task, chunks))
            choice = task.result()
            for chunk in chunks.last(choice):
                await self._event(request, chunk)
            self._choices.append(choice)

    async def _event(self, request: web.Request, value: dict[str, Any]) -> None:
        if not self._response.prepared:
            await self._response.prepare(request)
        await self._response.write(b"data: " + _json.encode(value) + b"\n\n")
