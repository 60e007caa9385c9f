"""Where the broker is: ``nats://host:port``, or several servers of one cluster with commas between them."""

from __future__ import annotations

import socket
from typing import Final
from urllib.parse import urlsplit

from broker.errors import BrokerUnreachable

SCHEMES: Final = ("nats", "tls", "ws", "wss")


def split(url: str) -> list[str]:
    """Every server named; those without a scheme have that of the first: ``nats://a:4222,b:4222``.

    Raises:
        BrokerUnreachable: one of them is no address.
    """
    first, *others = (one.strip() for one in url.split(","))
    scheme = first.partition("://")[0]
    servers = [first, *(one if "://" in one else f"{scheme}://{one}" for one in others)]
    for one in servers:
        try:
            parts = urlsplit(one)
            good = parts.scheme in SCHEMES and bool(parts.hostname) and parts.port != 0
        except ValueError:
            good = False
        if not good:
            raise BrokerUnreachable(
                f"{without_passwords(url)} is no address of a broker; write nats://host:port, several of a cluster "
                f"with commas"
            )
    return servers


def without_passwords(url: str) -> str:
    """For showing."""
    if "@" not in url:
        return url
    return ",".join(one.rpartition("@")[2] for one in url.split(","))


def why_unreachable(error: Exception) -> str:
    """Return what an attempt to connect failed with, in plain words."""
    if isinstance(error, ConnectionRefusedError):
        return "connection refused; no program listens there"
    if isinstance(error, socket.gaierror):
        return f"the host's name is not known ({error.strerror})"
    if isinstance(error, TimeoutError):
        return "the attempt to connect timed out"
    if "INFO" in str(error):  # what a NATS server says first
        return "what answers there is not a NATS server"
    return str(error) or type(error).__name__
