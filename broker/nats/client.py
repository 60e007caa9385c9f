"""All that is used of nats-py, without the web client that it loads for WebSockets.

nats-py takes aiohttp where it is installed, and with it a quarter of the start of every process; it does as well
without, and nothing here speaks WebSocket to a broker.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Final

_WEB: Final = "aiohttp"
_modules: dict[str, Any] = sys.modules  # None stands for a module that cannot be had
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
    """The client of nats-py, with one fault less."""

    async def _process_pong(self) -> None:
        """Take the answer to a ping that was given up, too: nats-py 2.16 fails there and never reads again."""
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    @property
    def has_stopped_reading(self) -> bool:
        """Whether it counts as connected although nothing is read."""
        return bool(self.is_connected and self._reading_task is not None and self._reading_task.done())


__all__ = ["GuardedClient", "Msg", "Subscription", "nats_errors"]
