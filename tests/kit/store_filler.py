"""Fills the store of a small broker from outside a run, as other users of the broker do."""

from __future__ import annotations

import json
from typing import Final

from broker.jetstream.bus import Bus

# of such a store: the logs of evaluations and dead letters have 320 MiB reserved, of which they
# need not use any
LIMIT_MIB: Final = 352
PIECE: Final = b"x" * (4 << 20)


class Filler:
    """Takes what room there is in a stream of its own, as other users of the broker do, and gives
    it back.
    """

    def __init__(self, bus: Bus) -> None:
        self._link = bus.link

    async def leave(self, room_mib: int) -> None:
        """Take all but that much of an empty store."""
        await self._open()
        for _ in range((LIMIT_MIB - room_mib << 20) // len(PIECE)):
            await self._call("filler", PIECE)

    async def fill(self) -> None:
        """Take all there is."""
        await self._open()
        for size in (len(PIECE), 1 << 16, 1 << 8, 0):
            while b'"error"' not in await self._call("filler", PIECE[:size]):
                pass

    async def _open(self) -> None:
        body = {"name": "filler", "subjects": ["filler"], "storage": "file", "num_replicas": 1}
        await self._call("$JS.API.STREAM.CREATE.filler", json.dumps(body).encode())

    async def free(self) -> None:
        await self._call("$JS.API.STREAM.PURGE.filler", b"")

    async def _call(self, subject: str, data: bytes) -> bytes:
        return bytes((await self._link.call(subject, data, timeout_s=20.0)).data)
