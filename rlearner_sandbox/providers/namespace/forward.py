"""Makes one address of the host reachable from a sandbox that has no network."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from ipaddress import ip_address
from urllib.parse import urlsplit

_PIECE = 1 << 16


def endpoint_address(endpoint: str | None) -> tuple[str, int]:
    """Return address and port of an endpoint.

    Raises:
        ValueError: if it is not ``http://ADDRESS:PORT``.
    """
    parts = urlsplit(endpoint or "")
    host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname or ""
    try:
        ip_address(host)
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    except (ValueError, KeyError):
        raise ValueError(
            f"endpoint: {endpoint!r} is not allowed; network: endpoint needs http://ADDRESS:PORT "
            "with an IP address or localhost"
        ) from None
    return host, port


class Forwarder:
    """Passes connections at a listening socket of a sandbox on to an address of the host."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, listener: socket.socket) -> None:
        """Accept connections from now on."""
        self._server = await asyncio.start_server(self._connect, sock=listener)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            try:
                far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
            except OSError:
                writer.transport.abort()
                return
            try:
                await asyncio.gather(
                    _copy_bytes(reader, far_writer), _copy_bytes(far_reader, writer)
                )
            finally:
                far_writer.transport.abort()
                writer.transport.abort()

    async def stop(self) -> None:
        """Close the socket and every connection."""
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _copy_bytes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(_PIECE):
        writer.write(piece)
        await writer.drain()
    with contextlib.suppress(OSError):
        writer.write_eof()
