"""Writes snapshots of the weights into the run's folder, and serves them over HTTP."""

from __future__ import annotations

import logging
import ssl
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

from aiohttp import web

from broker.errors import ConfigError
from broker.system.connections import is_loopback
from broker.weights.sender.send import WeightSender
from broker.weights.snapshots.publish import SnapshotPublisher
from broker.weights.snapshots.snapshot import NAME, NEWEST
from learner.config import TrainSection
from rlearner_text.openai import api_keys
from rlearner_text.openai.certificates import server_tls

log = logging.getLogger(__name__)

# In the run's folder.
FOLDER: Final = "snapshots"
# For open downloads when the learner ends.
CLOSE_S: Final = 5.0


async def open_snapshots(
    stack: AsyncExitStack,
    train: TrainSection,
    bind: str,
    folder: Path,
    run: str,
    sender: WeightSender,
) -> None:
    """Make the sender write snapshots of its versions.

    Args:
        stack: closes what was opened; the sender closes later.

    Raises:
        UserError: if the port or the API key is not available.
    """
    publisher = SnapshotPublisher(folder / FOLDER, run, train.weights_snapshot_every)
    if train.weights_snapshot_port is not None:
        server = SnapshotServer(folder / FOLDER)
        stack.push_async_callback(server.close)
        tls = load_certificate(train.weights_snapshot_cert, train.weights_snapshot_key)
        await server.start(bind, train.weights_snapshot_port, tls)
    stack.push_async_callback(publisher.close)
    sender.publisher = publisher


def load_certificate(cert: str | None, key: str | None) -> ssl.SSLContext | None:
    """Return TLS for a server by its certificate and key in PEM; None without them.

    Raises:
        ConfigError: if they cannot be used; see ``server_tls``.
    """
    if cert is None:
        return None
    # The configuration's check refuses one without the other.
    assert key is not None
    names = {"cert_name": "train.weights_snapshot_cert", "key_name": "train.weights_snapshot_key"}
    return server_tls(cert, key, **names)


class SnapshotServer:
    """Read-only HTTP server of /newest.json and the files that it names; needs the API key."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key, self._where = api_keys.find_key()
        self._runner: web.AppRunner | None = None
        # Once started, for example http://127.0.0.1:8100.
        self.address = ""

    async def start(self, bind: str, port: int, tls: ssl.SSLContext | None = None) -> None:
        """Start serving; port 0 takes any free port.

        Args:
            tls: the server's certificate and key; None: without TLS, on loopback only.

        Raises:
            ConfigError: if the port is not available, or other hosts could read what is sent.
        """
        if tls is None and not is_loopback(bind):
            keys = "train.weights_snapshot_cert and train.weights_snapshot_key"
            allowed = f"null at {bind} without TLS; set {keys}"
            raise ConfigError("train.weights_snapshot_port", port, allowed)
        app = web.Application()
        app.router.add_get("/{name}", self._file)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=CLOSE_S)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, bind, port, ssl_context=tls).start()
        except OSError as error:
            allowed = f"unavailable ({error.strerror}); give another, or 0"
            raise ConfigError("train.weights_snapshot_port", port, allowed) from None
        host, bound_port = self._runner.addresses[0][:2]
        scheme = "http" if tls is None else "https"
        authority = f"[{host}]" if ":" in host else host
        self.address = f"{scheme}://{authority}:{bound_port}"
        log.info("snapshots of the weights at %s, API key in %s", self.address, self._where)

    async def close(self) -> None:
        """Stop serving; idempotent."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _file(self, request: web.Request) -> web.StreamResponse:
        if not api_keys.matches(request.headers.get("Authorization"), self._key):
            text = "the API key is missing or wrong; send it as Authorization: Bearer KEY\n"
            return web.Response(status=401, text=text)
        name = request.match_info["name"]
        # Only names of snapshots are served, which have no slash.
        path = self._folder / name
        if (name != NEWEST and NAME.fullmatch(name) is None) or not path.is_file():
            return web.Response(status=404, text="there is no such file\n")
        return web.FileResponse(path, headers={"Cache-Control": "no-store"})
