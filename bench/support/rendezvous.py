"""A rendezvous for the processes of a benchmark, all of which are admitted by one key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from broker.weights.rendezvous.board_client import BoardClient, KeyPair, RendezvousAddress
from broker.weights.rendezvous.board_server import BoardServer

NAME: Final = "receiver"  # of the admitted process


@dataclass(frozen=True)
class MeetingPlace:
    """Where the processes meet, and the key pair that admits them; can be passed to child
    processes.
    """

    address: RendezvousAddress
    keys: KeyPair

    def connect(self, timeout_s: float = 60.0) -> BoardClient:
        """Return a store for the calling process."""
        return BoardClient(self.address, self.keys, timeout_s)


def serve_place(host: str) -> tuple[BoardServer, MeetingPlace]:
    """Serve a rendezvous until the returned server is closed."""
    server = BoardServer(host)
    keys = KeyPair.make()
    server.admit(NAME, keys.public)
    return server, MeetingPlace(RendezvousAddress(host, server.port, server.key), keys)
