"""Server-sent events of one request: what its engine tells of goes out as it comes, and as fast as the client reads.

The engine never waits. What it tells of meanwhile is kept here, at most the tokens that the request may have, and goes out in one chunk
when the client has read the one before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import msgspec
from aiohttp import web

from rlearner_text.openai.pieces import Piece, Tap
from rlearner_text.openai.problems import Problem
from rlearner_text.openai.replies import Choice

HEADERS: Final = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
encode: Final = msgspec.json.Encoder().encode  # twenty times as fast as the standard library's, once for each token


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


class Events(Protocol):
    """The events of one choice; each is a JSON object, whose ``type``, where it has one, also names the event."""

    def of(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """Those of pieces that came since the last."""
        ...

    def last(self, choice: Choice) -> list[dict[str, Any]]:
        """What the choice has beyond what was told, and how it ended."""
        ...


class Stream:
    """One streamed answer.

    Args:
        feeds, tasks, chunks: of each choice.
        ending: the data of the events behind all choices.
        news: as the feeds have it.
    """

    def __init__(
        self, feeds: Sequence[Feed], tasks: Sequence[asyncio.Task[Choice]], chunks: Sequence[Events],
        ending: Callable[[Sequence[Choice]], list[bytes]], news: asyncio.Event,
    ) -> None:  # fmt: skip
        self._ending = ending
        self._open: list[tuple[Feed, asyncio.Task[Choice], Events]] = list(zip(feeds, tasks, chunks, strict=True))
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
            await self._event(request, problem.body)  # the status is sent, and nothing follows
            return self._response
        for data in self._ending(self._choices):
            await self._response.write(b"data: " + data + b"\n\n")
        await self._response.write_eof()
        return self._response

    async def _forward(self, request: web.Request, feed: Feed, task: asyncio.Task[Choice], chunks: Events) -> None:
        ended = task.done()  # asked first: all is told before the task ends
        if pieces := feed.take():
            for chunk in chunks.of(pieces):
                await self._event(request, chunk)
        if ended:
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
