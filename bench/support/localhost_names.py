"""Connects to names below ``localhost`` as browsers do, without asking the machine's resolver."""

from __future__ import annotations

import socket
from ipaddress import ip_address

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult


class LocalhostResolver(AbstractResolver):
    """Resolves names below ``localhost`` to 127.0.0.1, and takes addresses."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the only address."""
        address = "127.0.0.1" if host.rpartition(".")[2] == "localhost" else str(ip_address(host))
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
        ]

    async def close(self) -> None:
        """Release nothing."""


def local_connector() -> aiohttp.TCPConnector:
    """Return a connector for a session with a console."""
    return aiohttp.TCPConnector(resolver=LocalhostResolver())
