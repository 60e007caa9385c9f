"""Reserves room in the broker's store for the few small messages that must be stored even if it is
full.

The learner fills the reserve while there is room. A process whose essential message (a learner's
epoch, a desired state, a weights offer) is refused for lack of room purges the reserve and retries;
purging works in a full store.
"""

from __future__ import annotations

import logging
from typing import Final

import msgspec

from broker.contract.streams import RESERVE
from broker.jetstream.api import call_api
from broker.jetstream.publish import PubAck
from broker.nats.connection import NatsLink
from broker.nats.nats_errors import ApiError, NoStream
from broker.nats.refusals import FULL

log = logging.getLogger(__name__)

PIECE_BYTES: Final = 1 << 19  # below the default max_payload of a server
PIECES: Final = 16


async def release_reserve(link: NatsLink, run: str) -> None:
    """Purge the reserve of a run, if any."""
    try:
        purged = (await call_api(link, f"STREAM.PURGE.{RESERVE.stream_name(run)}")).get("purged", 0)
    except NoStream:
        return
    if purged:
        log.warning(
            "the store of the broker at %s is full; using the reserve of run %s", link.where, run
        )


async def has_room(link: NatsLink, run: str) -> bool:
    """Return whether the broker stores one small message now, which also works if no limit is
    configured.

    Raises:
        Disconnected, TimeoutError, NoResponders, ApiError: if that cannot be determined.
    """
    return await _put_piece(link, run, "probe", b"")


async def fill_reserve(link: NatsLink, run: str, held_bytes: int) -> bool:
    """Fill the reserve, given the bytes that it holds; return False if there is no room.

    Raises:
        Disconnected, TimeoutError, NoResponders, ApiError: if that cannot be determined.
    """
    if held_bytes >= PIECES * PIECE_BYTES:
        return True
    for piece in range(PIECES):
        if not await _put_piece(link, run, str(piece), bytes(PIECE_BYTES)):
            return False
    return True


async def _put_piece(link: NatsLink, run: str, part: str, data: bytes) -> bool:
    answer = await link.call(RESERVE.subject(run, part), data)
    error = msgspec.json.decode(answer.data, type=PubAck).error
    if error is None or error.err_code in FULL:
        return error is None
    raise ApiError(error.code, error.err_code, error.description)
