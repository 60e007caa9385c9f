"""Decides which servers may use the rendezvous: those that asked through the broker and are present
in the run.
"""

from __future__ import annotations

import time
from typing import Final

from broker.contract import wire
from broker.runtime.presence import Roster
from broker.weights.rendezvous.board_server import BoardServer

PRESENCE_S: Final = 2.0  # a server's first presence may arrive after its first request
MAX_ADMITTED: Final = 10_000


class Admission:
    """Admits servers to one learner's rendezvous and expels them when their presence goes.

    Args:
        roster: of the servers; None: every server that asks is admitted, and stays.
    """

    def __init__(self, server: BoardServer, roster: Roster | None) -> None:
        self._server = server
        self._roster = roster
        self._ranks: set[str] = set()

    def admit_rank(self, name: str, key: str) -> None:
        """Admit a rank of this learner, for good."""
        self._ranks.add(name)
        self._server.admit(name, key)

    async def admit(self, join: wire.WeightsJoin) -> str:
        """Admit a server by the key of its request; return why not, empty if it is admitted."""
        if self._roster is not None:
            deadline = time.monotonic() + PRESENCE_S
            while (
                join.server not in self._present() and (left_s := deadline - time.monotonic()) > 0
            ):
                await self._roster.changed(left_s)
            if join.server not in self._present():
                return f"no presence of {join.server} is heard in this run, so it gets no weights"
        if join.server in self._ranks:
            return f"{join.server} is a rank of the learner"
        if len(self._server.admitted()) >= MAX_ADMITTED:
            return f"{MAX_ADMITTED} servers are admitted already"
        return "" if self._server.admit(join.server, join.key) else "the key is another server's"

    def tick(self) -> None:
        """Expel the servers whose presence is gone."""
        if self._roster is not None:
            for server in self._server.admitted() - self._present() - self._ranks:
                self._server.expel(server)

    def _present(self) -> set[str]:
        return (
            {presence.id for presence in self._roster.alive("rollout")}
            if self._roster is not None
            else set()
        )
