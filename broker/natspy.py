"""All that is used of nats-py, without the web client that it loads for WebSockets.

nats-py takes aiohttp where it is installed, and with it a quarter of the start of every process; it does as well without, and nothing here
speaks WebSocket to a broker.
"""

from __future__ import annotations

import sys
from typing import Any, Final

_WEB: Final = "aiohttp"
_modules: dict[str, Any] = sys.modules  # None stands for a module that cannot be had
_hidden = _WEB not in _modules
if _hidden:
    _modules[_WEB] = None
try:
    import nats.errors as nats_errors
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription
finally:
    if _hidden:
        del _modules[_WEB]

__all__ = ["Client", "Msg", "Subscription", "nats_errors"]
