"""Options that every ZeroMQ socket of the request channel has, and how its context ends."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

import zmq

from broker.channel.bundle import MAX_BUNDLE_BYTES

LINGER_MS: Final = 1000  # how long close waits for replies to be sent
HEARTBEAT_MS: Final = 2000
# without a heartbeat, after which a peer counts as gone even if TCP has not noticed
SILENT_MS: Final = 10_000
HANDSHAKE_MS: Final = 5000
MAX_UNREAD: Final = 1000  # bundles of one peer that wait to be read
# bundles to one peer that does not read them; a full ROUTER silently drops further ones
MAX_UNSENT: Final = 16_384


def open_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """Return a socket of a kind with limits, neither bound nor connected.

    Raises:
        zmq.ZMQError: if the context has no socket left.
    """
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, MAX_UNSENT)
    socket.setsockopt(zmq.RCVHWM, MAX_UNREAD)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_BUNDLE_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENT_MS)
    socket.setsockopt(zmq.IPV6, 1)
    return socket


async def terminate_context(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Wait in a thread until pending messages are sent or the linger time is over."""
    with contextlib.suppress(zmq.ZMQError):  # already terminated
        await asyncio.to_thread(context.term)
