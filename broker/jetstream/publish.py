"""Stores one message exactly once, publishing it until the broker confirms."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from broker.contract.sizes import Buffer
from broker.errors import LostState, RlearnerError, StoreFull
from broker.jetstream.api import call_api, find_message, stream_bounds
from broker.nats.connection import PAUSE_S, NatsLink
from broker.nats.nats_errors import Disconnected, ErrorDescription, NoResponders, NoStream
from broker.nats.refusals import FIRST_PAUSE_S, FULL, PendingPublish

log = logging.getLogger(__name__)

MESSAGE_ID: Final = "Nats-Msg-Id"
EXPECTED_LAST_SEQ: Final = "Nats-Expected-Last-Sequence"
EXPECTED_LAST_KEY_SEQ: Final = "Nats-Expected-Last-Subject-Sequence"
WRONG_LAST_SEQUENCE: Final = (10071, 10164)
IN_PROCESS: Final = 10158  # an earlier attempt with the same id is still pending
# per attempt; a leader that has just failed never confirms
CONFIRM_WITHIN_S: Final = (2.0, 3.0, 5.0)
NO_STREAM_AFTER_S: Final = 10.0


class PubAck(msgspec.Struct):
    """The broker's reply to a publish."""

    error: ErrorDescription | None = None
    seq: int = 0


_PUB_ACK: Final = msgspec.json.Decoder(PubAck)


async def store_message(
    link: NatsLink,
    stream_name: str,
    subject: str,
    data: Buffer,
    headers: dict[str, str],
    make_room: Callable[[], Awaitable[None]] | None = None,
    may_send: Callable[[], bool] = lambda: True,
    *,
    waits_for_room: bool = True,
) -> int | None:
    """Publish to a stream until confirmed; return the sequence, or None if an expected sequence did
    not match.

    The headers must contain a message id, so that a repetition within two minutes is not stored
    again.

    Args:
        make_room: for messages that must be stored even if the broker is full: awaited before each
            retry.
        may_send: called before each attempt; once it returns False, nothing more is sent, and None
            is returned.
        waits_for_room: False gives up if the broker is full.

    Raises:
        StoreFull: if the broker is full, and the message may not wait.
        LostState: if no stream takes the subject.
        RlearnerError: if the broker refuses the message permanently.
        Disconnected: if the link is closed while waiting.
    """
    with link.refusals.publish() as publish:
        return await _publish_until_confirmed(
            link,
            stream_name,
            subject,
            data=data,
            headers=headers,
            make_room=make_room,
            may_send=may_send,
            publish=publish,
            waits_for_room=waits_for_room,
        )


async def _publish_until_confirmed(
    link: NatsLink,
    stream_name: str,
    subject: str,
    data: Buffer,
    headers: dict[str, str],
    make_room: Callable[[], Awaitable[None]] | None,
    may_send: Callable[[], bool],
    *,
    publish: PendingPublish,
    waits_for_room: bool,
) -> int | None:
    attempts = 0
    since = time.monotonic()
    while True:
        await link.ready()
        if not may_send():
            return None
        timeout_s = CONFIRM_WITHIN_S[min(attempts, len(CONFIRM_WITHIN_S) - 1)]
        attempts += 1
        try:
            reply = await link.call(subject, data, headers=headers, timeout_s=timeout_s)
        except Disconnected:
            since = time.monotonic()
            await asyncio.sleep(PAUSE_S)
            continue
        except TimeoutError:
            if attempts > 1:
                log.warning("%s: no confirmation within %g s; sending again", subject, timeout_s)
            link.doubt(subject, timeout_s)
            # a process that listens to the subject takes the message although there is no stream
            since = await _require_after_a_while(link, stream_name, subject, since)
            continue
        except NoResponders:
            link.doubt(subject)
            since = await _require_after_a_while(link, stream_name, subject, since)
            await asyncio.sleep(0.1)
            continue
        ack = _PUB_ACK.decode(reply.data)
        if (error := ack.error) is None:
            link.trust(subject)
            return ack.seq
        if error.err_code in WRONG_LAST_SEQUENCE:
            if await _still_expected(link, stream_name, subject, headers):
                # an earlier attempt, from here or elsewhere, is still pending
                await asyncio.sleep(0.1)
                continue
            if attempts == 1:
                return None
            return await _already_stored(link, stream_name, subject, headers)
        if full := error.err_code in FULL:
            link.trust(subject)  # another server of the cluster has no more room either
        else:
            link.doubt(subject)
        if not full and error.code not in (429, 500, 503) and error.err_code != IN_PROCESS:
            raise RlearnerError(
                f"{subject}: the broker refuses the message: {error.description} ({error.err_code})"
            )
        if full and not waits_for_room:
            raise StoreFull(
                f"{subject}: the broker at {link.where} cannot store: {error.description}"
            )
        pause_s = publish.refused(subject, error.description, full=full)
        if full and make_room is not None:
            await asyncio.sleep(FIRST_PAUSE_S)
            await make_room()  # and publish at once, before others use the room
        else:
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))


async def _require_after_a_while(
    link: NatsLink, stream_name: str, subject: str, since: float
) -> float:
    """Return since when nobody has confirmed a message whose stream is known to exist: there may be
    no stream, or one without a leader.

    Raises:
        LostState: if it does not exist.
    """
    if time.monotonic() - since <= NO_STREAM_AFTER_S:
        return since
    await require_stream(link, stream_name, subject)
    return time.monotonic()


async def require_stream(link: NatsLink, stream_name: str, subject: str) -> None:
    """Check that a stream exists, waiting until the cluster as a whole can answer.

    Raises:
        LostState: if it does not.
    """
    try:
        await call_api(link, f"STREAM.INFO.{stream_name}")
    except NoStream:
        message = (
            f"the broker at {link.where} has no stream for {subject}; it was purged, or lost its "
            "store"
        )
        raise LostState(message) from None


async def _still_expected(
    link: NatsLink, stream_name: str, subject: str, headers: dict[str, str]
) -> bool:
    """Return whether the refused last sequence is right: clusters also refuse while a message
    awaits its majority.
    """
    if (expected := headers.get(EXPECTED_LAST_SEQ)) is not None:
        return (await stream_bounds(link, stream_name))[1] == int(expected)
    entry = await find_message(link, stream_name, last_of=subject)
    return (entry.seq if entry else 0) == int(headers[EXPECTED_LAST_KEY_SEQ])


async def _already_stored(
    link: NatsLink, stream_name: str, subject: str, headers: dict[str, str]
) -> int | None:
    """Return the message's sequence if an earlier attempt stored it, which makes the last sequence
    wrong too.

    Newer servers check the sequence before duplicates, older ones after.
    """
    expected = headers.get(EXPECTED_LAST_SEQ)
    entry = await find_message(
        link, stream_name, seq=None if expected is None else int(expected) + 1, last_of=subject
    )
    if entry and (entry.headers or {}).get(MESSAGE_ID) == headers[MESSAGE_ID]:
        return entry.seq
    return None
