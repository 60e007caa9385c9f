"""Accepts TLS connections for the HTTP server, and counts them from their handshake on."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Final

from rlearner_text.openai.connections import LINGER_S, Connection, Connections, LimitedHandler

log = logging.getLogger(__name__)

# Pause after the process ran out of descriptors.
FULL_S: Final = 0.1


class _Handshake:
    """A connection whose handshake is not complete."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.task: asyncio.Task[None] | None = None

    def abort(self) -> None:
        if self.task is not None:
            self.task.cancel()


class TlsListener:
    """Listens on a socket and hands each connection to a handler after its TLS handshake.

    asyncio's own server reports no connection before its handshake is complete, so half-open ones
    would have no limit.

    Args:
        listening: a bound socket; it stays open at ``close``.
        context: with certificate and key.
        connections: counts handshakes like requests that have not arrived yet.
        create_handler: returns the handler of a connection, which replaces its handshake in
            ``connections``.
    """

    def __init__(
        self,
        listening: socket.socket,
        context: ssl.SSLContext,
        connections: Connections,
        create_handler: Callable[[Connection], LimitedHandler],
    ) -> None:
        self._socket = listening
        self._context = context
        self._connections = connections
        self._create_handler = create_handler
        self._handshakes: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None

    def start(self, backlog: int) -> None:
        """Start to accept connections.

        Raises:
            OSError: if another process has started to listen on the address.
        """
        self._socket.setblocking(False)
        self._socket.listen(backlog)
        self._accepting = asyncio.create_task(self._accept())

    async def close(self) -> None:
        """Accept no more connections, and close those without a complete handshake; idempotent."""
        tasks = [*self._handshakes, *([self._accepting] if self._accepting is not None else [])]
        self._accepting = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(self._socket)
            except OSError as error:
                # The client is gone, or no descriptor is left.
                log.warning("cannot accept a connection: %s", error.strerror)
                await asyncio.sleep(FULL_S)
                continue
            handshake = _Handshake(connection)
            closing = self._connections.add(handshake, str(address[0]))
            if closing is not None:
                closing.abort()
            if closing is handshake:
                connection.close()
                continue
            handshake.task = task = loop.create_task(self._shake(handshake, str(address[0])))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _shake(self, handshake: _Handshake, peer: str) -> None:
        arrival_s = self._connections.limits.arrival_s
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._create_handler(handshake),
                handshake.connection,
                ssl=self._context,
                ssl_handshake_timeout=arrival_s,
                ssl_shutdown_timeout=LINGER_S,
            )
        except OSError as error:  # also SSLError
            reason = (error.reason if isinstance(error, ssl.SSLError) else None) or type(
                error
            ).__name__
            log.info("%s no TLS connection: %s", peer, reason)
        finally:
            self._connections.remove(handshake)
