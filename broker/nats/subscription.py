"""A subscription that survives reconnecting with a new client."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from broker.nats.client import GuardedClient, Msg, Subscription, nats_errors

log = logging.getLogger(__name__)

Callback = Callable[[Msg], Awaitable[None]]


class LinkSubscription:
    """One subscription of a link, which attaches it to every new client until it is forgotten.

    Args:
        forget: removes it from the link's list.
    """

    def __init__(
        self,
        forget: Callable[[LinkSubscription], None],
        subject: str,
        callback: Callback,
        queue: str,
    ) -> None:
        self._forget = forget
        self.subject = subject
        self.callback = callback
        self.queue = queue
        self._inner: Subscription | None = None

    async def attach(self, client: GuardedClient) -> None:
        """Subscribe on a new client."""
        self._inner = await client.subscribe(
            self.subject, self.queue, self.callback, pending_msgs_limit=0, pending_bytes_limit=0
        )  # no limits: the client would drop messages above them

    async def drain(self) -> None:
        """Unsubscribe; return when the callback has handled every message sent before."""
        await self._end(drain=True)

    async def close(self) -> None:
        """Unsubscribe at once."""
        await self._end(drain=False)

    async def _end(self, *, drain: bool) -> None:
        self._forget(self)
        inner = self._inner
        self._inner = None
        if inner is not None:
            try:
                if drain:
                    await inner.drain()  # type: ignore[no-untyped-call]
                else:
                    await inner.unsubscribe()
            except nats_errors.Error:
                log.debug("%s: the connection closed before its subscription", self.subject)
