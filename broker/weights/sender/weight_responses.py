"""The learner's responses to servers that ask for a version: where to meet, or why not."""

from __future__ import annotations

import asyncio
from typing import TypeAlias

from broker.contract import wire
from broker.weights.protocol.session import JOIN_TIMEOUT_S, TransferSettings
from broker.weights.sender.membership import StartTransfer

Reply: TypeAlias = "asyncio.Future[wire.WeightsSession]"


class WeightResponses:
    """The open requests, one per server.

    Args:
        read_by: the carrier of servers that read the learner's memory.

    Attributes:
        port: of the rendezvous.
        key: its public CURVE key.
    """

    def __init__(self, settings: TransferSettings, read_by: wire.Carrier = "shared") -> None:
        self._settings = settings
        self._read_by = read_by
        self.port = 0
        self.key = ""
        self._open: dict[str, Reply] = {}

    def expect(self, server: str) -> Reply:
        """Note a server's request; its earlier one needs no response any more."""
        if (older := self._open.pop(server, None)) is not None:
            older.cancel()
        reply = self._open[server] = asyncio.get_running_loop().create_future()
        return reply

    async def wait(self, server: str, reply: Reply) -> wire.WeightsSession | None:
        """Wait for the response; None if there is none in time and the server asks again."""
        try:
            return await asyncio.wait_for(reply, JOIN_TIMEOUT_S)
        except (TimeoutError, asyncio.CancelledError):
            return None
        finally:
            if self._open.get(server) is reply:
                del self._open[server]

    def begin(self, start: StartTransfer) -> None:
        """Tell all members of a transfer where to meet."""
        world_size = start.num_sent + 1
        for server in start.servers:
            rank = 1 + start.members.index(server)
            carrier = start.carrier if rank < world_size else self._read_by
            session = self._session(
                start.session, start.version, rank=rank, world_size=world_size, carrier=carrier
            )
            self._answer(server, session)

    def refuse(self, server: str, reason: str, version: int) -> None:
        """Refuse a server's request."""
        self._answer(server, self.refusal(reason, version))

    def refusal(self, reason: str, version: int) -> wire.WeightsSession:
        """Return a refusing response."""
        return self._session(reason, version, rank=0, world_size=1, error=reason)

    def refuse_all(self, reason: str, version: int) -> None:
        """Refuse all open requests."""
        for server in list(self._open):
            self.refuse(server, reason, version)

    def _answer(self, server: str, session: wire.WeightsSession) -> None:
        reply = self._open.get(server)
        if reply is not None and not reply.done():
            reply.set_result(session)

    def _session(
        self,
        session: str,
        version: int,
        *,
        rank: int,
        world_size: int,
        carrier: wire.Carrier = "gloo",
        error: str = "",
    ) -> wire.WeightsSession:
        return wire.WeightsSession(
            session=session,
            rank=rank,
            world_size=world_size,
            host=self._settings.host,
            port=self.port,
            key=self.key,
            version=version,
            timeout_s=self._settings.timeout_s,
            error=error,
            carrier=carrier,
        )
