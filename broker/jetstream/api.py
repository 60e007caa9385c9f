"""Client of JetStream's management API: idempotent requests, repeated until they are answered."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from broker.errors import UserError
from broker.nats.connection import PAUSE_S, NatsLink
from broker.nats.nats_errors import ApiError, Disconnected, ErrorDescription, NoResponders, NoStream

log = logging.getLogger(__name__)

TIMEOUTS_S: Final = (2.0, 3.0, 4.0)  # of one attempt; a leader that has just failed never answers
NO_JETSTREAM_AFTER_S: Final = 10.0
# for a replica that answers for a stream before it has caught up with the others
CATCH_UP_S: Final = 30.0
CATCH_UP_PAUSE_S: Final = 0.5
# The server's own JSON: settings of a stream or a consumer.
JetStreamConfig = dict[str, Any]
# consumer settings
EPHEMERAL: Final[JetStreamConfig] = {"ack_policy": "none", "mem_storage": True, "num_replicas": 1}
NO_STREAM: Final = 10059
NO_MESSAGE: Final = 10037


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """One stored message."""

    seq: int
    subject: str
    headers: dict[str, str] | None
    data: bytes
    # when the broker stored it, as RFC 3339 text of its clock; empty unless requested
    time: str = ""
    # the same as unix time; with the sequence, no two messages that a stream ever held share it
    stored_ns: int = 0


async def call_api(
    link: NatsLink, request: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Send a request and return the reply.

    Raises:
        ApiError: if JetStream refuses the request.
        UserError: if the broker runs without JetStream.
        Disconnected: if the link is closed while waiting.
    """
    payload = json.dumps(body).encode() if body else b""
    started_at = time.monotonic()
    attempts = 0
    while True:
        await link.ready()
        timeout_s = TIMEOUTS_S[min(attempts, len(TIMEOUTS_S) - 1)]
        try:
            answer = json.loads(
                (await link.call(f"$JS.API.{request}", payload, timeout_s=timeout_s)).data
            )
        except (Disconnected, TimeoutError) as error:
            if isinstance(error, TimeoutError):
                attempts += 1
                if attempts > 1:
                    log.warning("%s: no answer within %g s; retrying", request, timeout_s)
                link.doubt(request, timeout_s)
            started_at = time.monotonic()
            await asyncio.sleep(PAUSE_S)
            continue
        except NoResponders:
            link.doubt(request)
            if not link.has_jetstream and time.monotonic() - started_at > NO_JETSTREAM_AFTER_S:
                message = (
                    f"the broker at {link.where} runs without JetStream; start nats-server with -js"
                )
                raise UserError(message) from None
            await asyncio.sleep(0.2)
            continue
        if "error" not in answer:
            link.trust(request)
            return dict(answer)
        refusal = msgspec.convert(answer["error"], ErrorDescription)
        if refusal.err_code == NO_STREAM:
            reason = (
                f"{request}: no such stream on {link.where}; it was purged, or the store was lost"
            )
            raise NoStream(refusal.code, refusal.err_code, reason)
        if refusal.code != 503:  # 503: no leader yet, or JetStream is still starting
            link.trust(request)
            raise ApiError(refusal.code, refusal.err_code, refusal.description)
        link.doubt(request)
        await asyncio.sleep(0.2)


async def find_message(
    link: NatsLink, stream_name: str, *, seq: int | None = None, last_of: str = ""
) -> StoredEntry | None:
    """Return one message from the stream's leader, by its sequence or the newest of a subject; None
    if missing.
    """
    query: dict[str, Any] = {"last_by_subj": last_of} if seq is None else {"seq": seq}
    try:
        message = (await call_api(link, f"STREAM.MSG.GET.{stream_name}", query))["message"]
    except ApiError as error:
        if error.err_code == NO_MESSAGE:
            return None
        raise
    lines = base64.b64decode(message.get("hdrs", "")).decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines if ": " in line)
    data = base64.b64decode(message.get("data", ""))
    time = str(message.get("time", ""))
    stored_ns = unix_ns(time) if time else 0
    return StoredEntry(
        int(message["seq"]),
        str(message["subject"]),
        headers or None,
        data=data,
        time=time,
        stored_ns=stored_ns,
    )


def unix_ns(text: str) -> int:
    """Return the time of an RFC 3339 text in UTC, with up to nine digits of a second."""
    seconds, _, fraction = text.removesuffix("Z").partition(".")
    since = datetime.fromisoformat(seconds).replace(tzinfo=UTC) - datetime.fromtimestamp(0, UTC)
    return round(since.total_seconds()) * 10**9 + int(fraction.ljust(9, "0") or 0)


async def stream_bounds(link: NatsLink, stream_name: str, *, known: int = 0) -> tuple[int, int]:
    """Return the (first kept, last ever stored) sequence of a stream; (last + 1, last) if it is
    empty.

    Args:
        known: a sequence that was stored. If a stream of several replicas ends before it, the
            server that answers may be behind the others after a partition; it is queried again for
            up to ``CATCH_UP_S`` seconds.
    """
    started_at = time.monotonic()
    while True:
        answer = await call_api(link, f"STREAM.INFO.{stream_name}")
        state = answer["state"]
        first = int(state["first_seq"])
        last = int(state["last_seq"])
        replicas = int(answer.get("config", {}).get("num_replicas", 1))
        if last >= known or replicas < 2 or time.monotonic() - started_at > CATCH_UP_S:
            return (first, last) if state["messages"] else (last + 1, last)
        log.warning(
            "%s ends at %d on the server that answers, but %d was stored; retrying",
            stream_name,
            last,
            known,
        )
        await asyncio.sleep(CATCH_UP_PAUSE_S)
