"""The parts of nats-py that the project uses, imported without aiohttp.

nats-py imports aiohttp if it is installed, only for WebSockets, which the project does not use. The import would take a
quarter of every process's startup time.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any, Final

from broker.identity.keys import Key

_WEB: Final = "aiohttp"
_modules: dict[str, Any] = sys.modules  # None makes the import of a module fail
_hidden = _WEB not in _modules
if _hidden:
    _modules[_WEB] = None
try:
    import nats.errors as nats_errors
    from nats.aio.client import Client as _Client
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription
finally:
    if _hidden:
        del _modules[_WEB]


class GuardedClient(_Client):
    """The nats-py client with a bug fix, and with a key that is looked up at every attempt to connect.

    A private broker makes its keys when it starts, which may be after its clients.

    Args:
        find_key: returns the key, None for a login in the address or none at all.
    """

    def __init__(self, find_key: Callable[[], Key | None] = lambda: None) -> None:
        super().__init__()
        self._find_key = find_key

    def _connect_command(self) -> bytes:
        if (key := self._find_key()) is not None:
            self._public_nkey, self._signature_cb = key.public, key.sign_nonce
        return super()._connect_command()

    async def _process_pong(self) -> None:
        """Accept the reply to an abandoned ping too: nats-py 2.16 fails there and stops reading."""
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    def drop_attempt(self) -> None:
        """Close the socket of an attempt that the server refused, which nats-py 2.16 leaves open."""
        if not self.is_connected and self._transport is not None:
            self._transport.close()  # type: ignore[no-untyped-call]

    @property
    def has_stopped_reading(self) -> bool:
        """Whether the client reports a connection but no longer reads from it."""
        return bool(self.is_connected and self._reading_task is not None and self._reading_task.done())


__all__ = ["GuardedClient", "Msg", "Subscription", "nats_errors"]
