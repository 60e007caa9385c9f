"""Clients that try what their identity does not allow, on the wire of NATS, without the project's
own client.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import nats
from nats.aio.client import Client

from broker.contract.permissions import inbox_prefix
from broker.identity.login import find_login

ANSWER_S = 0.3  # the broker refuses at once; a request that it allows is answered in milliseconds


class Stranger:
    """One connection, with what the broker refused on it."""

    def __init__(self, client: Client, inbox: str) -> None:
        self.client, self.inbox, self.refused = client, inbox, list[str]()

    async def publish(
        self, subject: str, data: bytes = b"x", reply: str = "", **headers: str
    ) -> None:
        """Publish and wait until the broker has processed it."""
        await self.client.publish(subject, data, reply, headers=headers or None)
        await self.client.flush()
        # its refusal arrives before the reply to the flush, and is reported in a task
        await asyncio.sleep(0.05)

    async def ask(self, subject: str, body: Any = None) -> dict[str, Any] | None:
        """Return the reply to a request, None without one."""
        try:
            data = json.dumps(body).encode() if body is not None else b""
            return dict(
                json.loads((await self.client.request(subject, data, timeout=ANSWER_S)).data)
            )
        except (nats.errors.TimeoutError, nats.errors.NoRespondersError):
            return None

    async def hears(self, subject: str, cause: Any) -> list[bytes]:
        """Return what arrives on a subject while ``cause`` runs."""
        heard: list[bytes] = []

        async def note(message: Any) -> None:
            heard.append(message.data)

        await self.client.subscribe(subject, cb=note)
        await self.client.flush()
        await cause()
        await asyncio.sleep(0.2)
        return heard


async def is_refused(url: str, **options: Any) -> bool:
    """Return whether the broker refuses a login."""
    client = Client()

    async def ignore(_: Exception) -> None:
        """The caller learns of it by the exception."""

    try:
        await client.connect(
            url, allow_reconnect=False, connect_timeout=3, error_cb=ignore, **options
        )
    except (nats.errors.Error, OSError) as error:
        return "Authorization Violation" in str(error) or isinstance(error, OSError)
    finally:
        await client.close()
    return False


@asynccontextmanager
async def stranger(url: str, role: str, run: str) -> AsyncIterator[Stranger]:
    """Connect with the key of a role of a run."""
    login = find_login(url, role, run)
    assert login.key is not None
    one = Stranger(Client(), inbox_prefix(role, run, ""))

    async def note(error: Exception) -> None:
        one.refused.append(str(error))

    try:
        await one.client.connect(
            url,
            nkeys_seed_str=login.key.seed,
            inbox_prefix=one.inbox,
            error_cb=note,
            allow_reconnect=False,
        )
        yield one
    finally:
        await one.client.close()
