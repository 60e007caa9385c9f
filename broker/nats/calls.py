"""Matches the replies that arrive in one inbox to pending requests."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from broker.contract.permissions import INBOX
from broker.nats.client import Msg


class PendingCalls:
    """Unanswered requests of one link; the reply subject is ``inbox``, a dot and the request's
    token.

    Attributes:
        inbox: below what the link's identity may read, which is known once it is connected.
    """

    def __init__(self) -> None:
        self.inbox = f"{INBOX}.{secrets.token_hex(8)}"
        self._tokens = itertools.count(1)
        # replies, and where the requests went
        self._waiting: dict[str, tuple[asyncio.Future[Msg], str]] = {}

    def next_token(self) -> str:
        """Return a token that is unique in this inbox."""
        return str(next(self._tokens))

    @contextmanager
    def expect(self, subject: str = "") -> Iterator[tuple[str, asyncio.Future[Msg]]]:
        """Yield the reply subject of one request to a subject, and the future of its reply."""
        token = self.next_token()
        answer = asyncio.get_running_loop().create_future()
        self._waiting[token] = answer, subject
        try:
            yield f"{self.inbox}.{token}", answer
        finally:
            self._waiting.pop(token, None)

    async def answer(self, message: Msg) -> None:
        """Deliver a reply to its request; drop it if no request is waiting."""
        waiting, _ = self._waiting.get(message.subject.rpartition(".")[2], (None, ""))
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    def drop(self, error: Exception, subject: str = "") -> None:
        """Fail every pending request with this error, or those to one subject, which nats-py writes
        in lower case.
        """
        for answer, sent_to in self._waiting.values():
            if subject.lower() in ("", sent_to.lower()):
                fail_call(answer, error)


def fail_call(answer: asyncio.Future[Msg], error: Exception) -> None:
    """Fail the call with this error unless it has its reply."""
    if not answer.done():
        answer.set_exception(error)
        answer.exception()  # mark as retrieved: the waiting task may be cancelled at this moment
