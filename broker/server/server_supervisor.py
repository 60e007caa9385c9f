"""Looks after a private nats-server: starts it again when it has died, and when a full disk has stopped it and there is
space again.

A nats-server whose store is full neither confirms nor refuses what is published to it (2.15.1), or stops answering
altogether (2.9.10), and stays so until it is started again, however much space there is by then. Nothing that was
confirmed is lost, and who publishes waits.
"""

from __future__ import annotations

import os
from typing import Final

from broker.server.private_server import BrokerServer

FULL_BELOW_BYTES: Final = 1 << 20
# or a tenth of a smaller file system: that much must be free before it is worth starting again
ROOM_BYTES: Final = 64 << 20


class ServerSupervisor:
    """To be asked every now and then.

    Args:
        server: has been started.
        revive: whether to start it again when it has died; a full disk is looked after in any case.

    Attributes:
        full: the store had no space since the server was last started.
    """

    def __init__(self, server: BrokerServer, *, revive: bool = True) -> None:
        self._server, self._revive = server, revive
        self.full = False

    def look(self) -> list[str]:
        """One line for each thing that has happened; blocks while the server starts.

        Raises:
            UserError: it cannot be started again.
        """
        died = self._server.pid
        if not self._server.running:
            if not self._revive:
                return []
            self._start()
            return [f"broker (pid {died}) died; started again as pid {self._server.pid}"]
        space = os.statvfs(self._server.store)
        free, size = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
        if not self.full and free < FULL_BELOW_BYTES:
            self.full = True
            return [f"{self._server.store}: no space left for the broker; everyone waits until there is"]
        if self.full and free >= min(ROOM_BYTES, size // 10):
            self._start()
            return [
                f"{self._server.store}: there is space again; broker (pid {died}) started again as pid "
                f"{self._server.pid}"
            ]
        return []

    def _start(self) -> None:
        self._server.stop()
        self._server.start()
        self.full = False
