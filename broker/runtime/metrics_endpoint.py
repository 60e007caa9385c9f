"""Serves ``/metrics``, ``/healthz`` and ``/readyz`` from a thread of its own."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import socket
import threading
import time
from contextlib import suppress
from typing import Any, Final

from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from broker.errors import UserError
from broker.runtime.health import TURNS_WITHIN_S, Health

log = logging.getLogger(__name__)

# More are closed at once: they would take the process's files.
MAX_CONNECTIONS: Final = 64
OPEN_S: Final = 60.0  # after which a connection is closed; scrapers open another
REAP_EVERY_S: Final = 5.0
START_WITHIN_S: Final = 10.0


class MetricsEndpoint:
    """An HTTP server in a thread of its own.

    ``/healthz`` is 200 while the process's event loop turns, ``/readyz`` while the process takes
    work, else both are 503; the body is one line that says why.

    Args:
        bind: address to listen on.
        number: port, 0 for any.
        health: of this process.
        collectors: asked for their figures at each scrape, in the thread.
        turns_within_s: seconds without a turn of the event loop after which ``/healthz`` fails.

    Attributes:
        port: where it listens.

    Raises:
        UserError: if the address is not this host's, or the port is taken.
    """

    def __init__(
        self,
        bind: str,
        number: int,
        health: Health,
        *collectors: Collector,
        turns_within_s: float = TURNS_WITHIN_S,
    ) -> None:
        self._health = health
        self._turns_within_s = turns_within_s
        self._registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._registry)
        for collector in collectors:
            self._registry.register(collector)
        self._socket = _open_listener(bind, number)
        self.port = int(self._socket.getsockname()[1])
        self.url = f"http://{f'[{bind}]' if ':' in bind else bind}:{self.port}"
        self._opened: dict[asyncio.BaseTransport, float] = {}
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()
        self._started.wait(START_WITHIN_S)

    def close(self) -> None:
        """Stop serving; wait a moment for the thread."""
        with suppress(RuntimeError):  # its loop has ended
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(1.0)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except Exception:
            # The process works without this page.
            log.exception("the metrics page ended")
        finally:
            self._socket.close()
            self._loop.close()

    async def _serve(self) -> None:
        app = web.Application()
        app.add_routes(
            [
                web.get("/metrics", self._metrics),
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
            ]
        )
        runner = web.AppRunner(
            app,
            access_log=None,
            handle_signals=False,
            keepalive_timeout=OPEN_S,
            shutdown_timeout=0.1,
        )
        await runner.setup()
        assert runner.server is not None
        make = runner.server

        def protocol() -> asyncio.BaseProtocol:
            return make() if len(make.connections) < MAX_CONNECTIONS else _Refusal()

        server = await self._loop.create_server(protocol, sock=self._socket)
        reaping = asyncio.create_task(self._reap(make))
        self._started.set()
        try:
            await self._stop.wait()
        finally:
            reaping.cancel()
            server.close()
            await runner.cleanup()

    async def _reap(self, server: Any) -> None:
        """Close connections that have been open for long, with or without a request."""
        while True:
            await asyncio.sleep(REAP_EVERY_S)
            now = time.monotonic()
            transports = [
                transport
                for connection in server.connections
                if (transport := connection.transport) is not None
            ]
            self._opened = {
                connection: self._opened.get(connection, now) for connection in transports
            }
            for transport, since in self._opened.items():
                if now - since > OPEN_S:
                    transport.close()

    async def _metrics(self, request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        response = web.Response(body=encode(self._registry), headers={"Content-Type": content_type})
        response.enable_compression()
        return response

    async def _healthz(self, request: web.Request) -> web.Response:
        if self._health.is_turning(self._turns_within_s):
            return web.Response(text="ok\n")
        stood_s = time.monotonic() - self._health.beat
        return web.Response(status=503, text=f"the event loop has not turned for {stood_s:.0f} s\n")

    async def _readyz(self, request: web.Request) -> web.Response:
        status = (
            200 if self._health.is_ready and self._health.is_turning(self._turns_within_s) else 503
        )
        return web.Response(status=status, text=f"{self._health.state}: {self._health.status}\n")


class _Refusal(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


def _open_listener(bind: str, number: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(bind).version == 6 else socket.AF_INET
    except ValueError:
        raise UserError(
            f"--metrics-bind: {bind!r} is not an IP address, such as 127.0.0.1 or 0.0.0.0"
        ) from None
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((bind, number))
        listener.listen(128)
    except PermissionError:
        listener.close()
        raise UserError(
            f"--metrics-port: port {number} needs privileges; choose one above 1023"
        ) from None
    except OSError as error:
        listener.close()
        raise UserError(_why_not(bind, number, error)) from None
    listener.setblocking(False)
    return listener


def _why_not(bind: str, number: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"--metrics-port: port {number} on {bind} is already in use; choose another, or 0 "
            "for any"
        )
    return f"--metrics-bind: cannot listen on {bind}: {error.strerror}; use an address of this host"
