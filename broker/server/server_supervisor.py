"""Restarts the private nats-server when it dies or after a full disk has space again, ends expired
keys, and names whom the server refused.

A nats-server with a full store neither confirms nor refuses messages (2.15.1) or stops answering
(2.9.10), and stays so until it is restarted. Nothing that was confirmed is lost; publishers wait.
"""

from __future__ import annotations

import os
from typing import Final

from broker.identity.key_folder import KeyFolder
from broker.server.private_server import BrokerServer
from broker.server.refusal_log import RefusalLog

FULL_BELOW_BYTES: Final = 1 << 20
# of free space before a restart is worth it, or a tenth of a smaller file system
ROOM_BYTES: Final = 64 << 20


class ServerSupervisor:
    """Supervisor that is polled.

    Args:
        server: a started server.
        revive: whether to restart it after it died; a full disk is handled in any case.

    Attributes:
        full: whether the store was full since the last start.
    """

    def __init__(self, server: BrokerServer, *, revive: bool = True) -> None:
        self._server = server
        self._revive = revive
        self._keys = KeyFolder(server.keys_path)
        self._refusals = RefusalLog(server.log_path)
        self.full = False

    def look(self) -> list[str]:
        """Return a line for each event; block while the server starts.

        Raises:
            UserError: if it cannot be restarted.
        """
        self._keys.expire()
        if self._server.running:
            self._keys.follow(self._server.pid)
        return [*self._refusals.news(self._keys.users), *self._revived()]

    def _revived(self) -> list[str]:
        """Restart the server if it died, or if a full disk has space again; return a line for what
        happened.
        """
        died = self._server.pid
        if not self._server.running:
            if not self._revive:
                return []
            self._start()
            return [f"broker (pid {died}) died; restarted as pid {self._server.pid}"]
        space = os.statvfs(self._server.store)
        free = space.f_bavail * space.f_frsize
        size = space.f_blocks * space.f_frsize
        if not self.full and free < FULL_BELOW_BYTES:
            self.full = True
            return [f"{self._server.store}: no space left for the broker; all processes wait"]
        if self.full and free >= min(ROOM_BYTES, size // 10):
            self._start()
            return [
                f"{self._server.store}: space again; broker (pid {died}) restarted as pid {self._server.pid}"
            ]
        return []

    def _start(self) -> None:
        self._server.stop()
        self._server.start()
        self.full = False
