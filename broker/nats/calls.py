"""Requests on their way to the broker, and the answers to them, which all come to one inbox."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from broker.nats.client import Msg
from broker.nats.nats_errors import Disconnected


class PendingCalls:
    """The requests of one link that have no answer yet.

    Attributes:
        inbox: where answers come to, with the request's token behind it.
    """

    def __init__(self) -> None:
        self.inbox = f"_INBOX.{secrets.token_hex(8)}"
        self._tokens = itertools.count(1)
        self._waiting: dict[str, asyncio.Future[Msg]] = {}

    def next_token(self) -> str:
        """Unique in this inbox."""
        return str(next(self._tokens))

    @contextmanager
    def expect(self) -> Iterator[tuple[str, asyncio.Future[Msg]]]:
        """The subject for the answer to one request, and the answer."""
        token = self.next_token()
        answer: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        self._waiting[token] = answer
        try:
            yield f"{self.inbox}.{token}", answer
        finally:
            self._waiting.pop(token, None)

    async def answer(self, message: Msg) -> None:
        """An answer that came in; one that nobody waits for any more is dropped."""
        waiting = self._waiting.get(message.subject.rpartition(".")[2])
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    def drop(self, why: Disconnected) -> None:
        """None of them will be answered."""
        for answer in self._waiting.values():
            fail(answer, why)


def fail(answer: asyncio.Future[Msg], error: Exception) -> None:
    """Fail the call with this error, unless its answer has come."""
    if not answer.done():
        answer.set_exception(error)
        answer.exception()  # counts as retrieved: who waits may be cancelled in this very moment
