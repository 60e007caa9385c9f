"""A subscription that outlives the client it was made on."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from broker.nats.client import GuardedClient, Msg, Subscription, nats_errors

log = logging.getLogger(__name__)

Callback = Callable[[Msg], Awaitable[None]]


class LinkSubscription:
    """One subscription of a link; the link attaches it to every client it makes, until it is forgotten.

    Args:
        forget: takes it off the link's list.
    """

    def __init__(
        self, forget: Callable[[LinkSubscription], None], subject: str, callback: Callback, queue: str
    ) -> None:
        self._forget, self.subject, self.callback, self.queue = forget, subject, callback, queue
        self._inner: Subscription | None = None

    async def attach(self, client: GuardedClient) -> None:
        """Subscribe on a new connection."""
        self._inner = await client.subscribe(
            self.subject, self.queue, self.callback, pending_msgs_limit=0, pending_bytes_limit=0
        )  # no limits: the client would drop what exceeds them

    async def drain(self) -> None:
        """Ask for no more, and return when all that was sent before has been called back with."""
        self._forget(self)
        inner, self._inner = self._inner, None
        if inner is not None:
            try:
                await inner.drain()  # type: ignore[no-untyped-call]
            except nats_errors.Error:
                log.debug("%s: the connection went before its subscription", self.subject)

    async def close(self) -> None:
        """Call back no more."""
        self._forget(self)
        inner, self._inner = self._inner, None
        if inner is not None:
            try:
                await inner.unsubscribe()
            except nats_errors.Error:
                log.debug("%s: the connection went before its subscription", self.subject)
