"""A link of few bytes per second between a process and its broker: a TCP proxy on loopback."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from broker.identity.login import keys_of, note_keys

# of the proxy's sockets: what a socket holds has crossed the link already
BUFFER_BYTES: Final = 64 * 1024


@dataclass
class SlowLink:
    """Counts what crosses it.

    Attributes:
        url: where to connect instead of the broker.
        up: bytes sent to the broker.
        down: bytes received from the broker.
        connections: how many were made.
    """

    url: str = ""
    up: int = 0
    down: int = 0
    connections: int = 0


@asynccontextmanager
async def slow_link(
    broker_url: str, *, up: float = 1e9, down: float = 1e9
) -> AsyncIterator[SlowLink]:
    """Open a link with so many bytes per second in each direction; all connections share them."""
    link, tasks = SlowLink(), set[asyncio.Task[None]]()
    target = urlsplit(broker_url)
    next_free = {"up": 0.0, "down": 0.0}

    async def pump(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: str, rate: float
    ) -> None:
        loop = asyncio.get_running_loop()
        try:
            while data := await reader.read(max(1024, min(BUFFER_BYTES, int(rate / 50)))):
                next_free[direction] = (
                    max(next_free[direction], loop.time() - 0.05) + len(data) / rate
                )
                await asyncio.sleep(next_free[direction] - loop.time())
                writer.write(data)
                await writer.drain()
                setattr(link, direction, getattr(link, direction) + len(data))
        except OSError:
            pass
        finally:
            writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link.connections += 1
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(
            sock, (target.hostname or "", target.port or 0)
        )
        there_reader, there_writer = await asyncio.open_connection(sock=sock, limit=BUFFER_BYTES)
        for one in (writer, there_writer):
            one.transport.set_write_buffer_limits(high=BUFFER_BYTES)
        for work in (
            pump(reader, there_writer, "up", up),
            pump(there_reader, writer, "down", down),
        ):
            task = asyncio.create_task(work)
            tasks.add(task)

    listening = socket.socket()
    # before any connection: it decides the window
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    listening.bind(("127.0.0.1", 0))
    server = await asyncio.start_server(accept, sock=listening, limit=BUFFER_BYTES)
    link.url = f"nats://127.0.0.1:{listening.getsockname()[1]}"
    # clients log in at the proxy's address as at the broker's
    note_keys(link.url, keys_of(broker_url).path)
    try:
        yield link
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
