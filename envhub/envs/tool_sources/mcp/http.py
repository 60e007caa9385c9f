"""An HTTP client for MCP servers that bounds what it reads and follows no proxy."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Final

import httpx2

from envhub.envs.tool_sources.base import MAX_MESSAGE_BYTES

CONNECT_S: Final = 10.0
# an answer of a tool that runs for long may be silent
READ_S: Final = 3600.0


class OversizedAnswer(httpx2.StreamError):
    """A server answered more than is read."""


class _BoundedStream(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for data in self._stream:
            size += len(data)
            if size > MAX_MESSAGE_BYTES:
                raise OversizedAnswer(f"the answer is larger than {MAX_MESSAGE_BYTES} bytes")
            yield data

    async def aclose(self) -> None:
        await self._stream.aclose()


class BoundedTransport(httpx2.AsyncHTTPTransport):
    """Limits the answer of each request."""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await super().handle_async_request(request)
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        if request.method == "POST":
            response.stream = _BoundedStream(response.stream)
        return response


def make_client(headers: Mapping[str, str]) -> httpx2.AsyncClient:
    """Return a client that sends the headers with every request."""
    timeout = httpx2.Timeout(CONNECT_S, read=READ_S)
    return httpx2.AsyncClient(headers=dict(headers), timeout=timeout, transport=BoundedTransport())
