"""Matches the replies that arrive in one inbox to pending requests."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from broker.nats.client import Msg
from broker.nats.nats_errors import Disconnected


class PendingCalls:
    """Unanswered requests of one link; the reply subject is ``inbox``, a dot and the request's token."""

    def __init__(self) -> None:
        self.inbox = f"_INBOX.{secrets.token_hex(8)}"
        self._tokens = itertools.count(1)
        self._waiting: dict[str, asyncio.Future[Msg]] = {}

    def next_token(self) -> str:
        """Return a token that is unique in this inbox."""
        return str(next(self._tokens))

    @contextmanager
    def expect(self) -> Iterator[tuple[str, asyncio.Future[Msg]]]:
        """Yield the reply subject of one request and the future of its reply."""
        token = self.next_token()
        answer = self._waiting[token] = asyncio.get_running_loop().create_future()
        try:
            yield f"{self.inbox}.{token}", answer
        finally:
            self._waiting.pop(token, None)

    async def answer(self, message: Msg) -> None:
        """Deliver a reply to its request; drop it if no request is waiting."""
        waiting = self._waiting.get(message.subject.rpartition(".")[2])
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    def drop(self, why: Disconnected) -> None:
        """Fail every pending request with this error."""
        for answer in self._waiting.values():
            fail(answer, why)


def fail(answer: asyncio.Future[Msg], error: Exception) -> None:
    """Fail the call with this error unless it has its reply."""
    if not answer.done():
        answer.set_exception(error)
        answer.exception()  # mark as retrieved: the waiting task may be cancelled at this moment
