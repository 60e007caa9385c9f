"""The parts of nats-py that the project uses, imported without aiohttp.

nats-py imports aiohttp if it is installed, only for WebSockets, which the project does not use. The
import would take a quarter of every process's startup time.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from typing import Any, Final

from broker.identity.cluster_login import CERT, CERT_KEY
from broker.identity.login import Login
from broker.nats.addresses import INSECURE
from broker.system.connections import is_loopback

NO_LOGIN: Final = (
    "there is no login for it; pass a join token with --join, set RL_BROKER_NKEY or another "
    "login of your own cluster "
    "(docs/cluster.md), or add --insecure"
)
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


class Unprotected(nats_errors.Error):
    """A connection would not be encrypted, need no login, or lack the certificate that the server
    requires.
    """


class GuardedClient(_Client):
    """The nats-py client with a bug fix, a login looked up at every attempt, and nothing
    unprotected to other hosts.

    A private broker makes its keys when it starts, which may be after its clients.

    Args:
        find_login: returns the login; one without a key leaves it to the address.
    """

    def __init__(self, find_login: Callable[[], Login] = Login) -> None:
        super().__init__()
        self._find_login = find_login

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        if (
            initial_connection
            and self._current_server is not None
            and self._current_server.uri.scheme == "tls"
        ):
            # whatever the server says: the login must not cross in clear
            info["tls_required"] = True
        if initial_connection:
            login = self._find_login()
            if info.get("tls_verify") and not (login.cluster and login.cluster.certificate):
                raise Unprotected(f"it requires a client certificate; set {CERT} and {CERT_KEY}")
            if (context := login.tls_context()) is not None:
                self.options["tls"] = context  # read again: a certificate may have been renewed
        await super()._process_info(info, initial_connection)

    def _connect_command(self) -> bytes:
        login = self._find_login()
        self._require_protection(login)
        self._note_tls()
        if (key := login.key) is not None:
            self._public_nkey = key.public
            self._signature_cb = key.sign_nonce
        if (cluster := login.cluster) is not None:
            self._user_jwt_cb = cluster.jwt.encode if cluster.jwt else None
            if cluster.password:
                self.options.update(user=cluster.user, password=cluster.password)
        return super()._connect_command()

    def _note_tls(self) -> None:
        """Tell asyncio of an upgrade to TLS; else it logs a warning about nats-py's protocol at
        every disconnect.
        """
        writer: Any = getattr(self._transport, "_io_writer", None)
        if writer is None or writer.get_extra_info("ssl_object") is None:
            return
        # None: the server has closed it already
        if (protocol := writer.transport.get_protocol()) is not None:
            protocol._over_ssl = True

    def _require_protection(self, login: Login) -> None:
        """Check that a connection to another host is encrypted and has a login.

        Raises:
            Unprotected: if not, unless the environment variable of --insecure is set.
        """
        assert self._current_server is not None
        uri = self._current_server.uri
        if is_loopback(uri.hostname or "") or os.environ.get(INSECURE):
            return
        if not self._server_info.get("tls_required"):
            raise Unprotected("it uses no TLS; add --insecure only on a network that you trust")
        if login.key is None and not login.role:
            raise Unprotected(NO_LOGIN)

    async def _process_pong(self) -> None:
        """Accept the reply to an abandoned ping too: nats-py 2.16 fails there and stops reading."""
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    def drop_attempt(self) -> None:
        """Close the socket of an attempt that failed, which nats-py 2.16 leaves open.

        After a failed TLS handshake it would wait forever for the end of that socket's streams.
        """
        transport: Any = self._transport
        if not self.is_connected and transport is not None:
            for writer in filter(None, (transport._io_writer, transport._bare_io_writer)):
                writer.transport.abort()
            self._transport = None

    @property
    def has_stopped_reading(self) -> bool:
        """Whether the client reports a connection but no longer reads from it."""
        return bool(
            self.is_connected and self._reading_task is not None and self._reading_task.done()
        )


__all__ = ["GuardedClient", "Msg", "Subscription", "Unprotected", "nats_errors"]
