"""Ends tickets: names the log and the deduplication id of a result, and publishes closings."""

from __future__ import annotations

import logging
from typing import Final

import msgspec

from broker.contract import wire
from broker.contract.streams import EVALS, EVALTICKETS, SAMPLES, TICKETS, Stream
from broker.jetstream.bus import Bus, Delivery
from broker.system.workers.line import clean

log = logging.getLogger(__name__)

DETAIL_CHARS: Final = 1000


def ticket_key(number: int, *, evaluation: bool) -> str:
    """Return the key of a ticket, unique in a run; the broker drops a second result published with it as message id."""
    return f"{(EVALTICKETS if evaluation else TICKETS).name}-{number}"


def result_log(*, evaluation: bool) -> Stream:
    """Return the log in which a ticket ends."""
    return EVALS if evaluation else SAMPLES


async def close_ticket(
    bus: Bus, delivery: Delivery, stream: Stream, closed: wire.Closed, *, evaluation: bool, keep: bool = True
) -> None:
    """End a ticket without a group: publish the closing, store the message as a dead letter, then acknowledge.

    Args:
        delivery: of the ticket or its group, taken from ``stream``.
        closed: its detail is cut to one line; with ticket 0 (unknown) it is not published, and the learner's timeout
            closes the ticket.
        keep: whether the operator is to have the message as a dead letter.
    """
    reason, detail = clean(f"{closed.reason}: {closed.detail}", DETAIL_CHARS), clean(closed.detail, DETAIL_CHARS)
    key = ticket_key(closed.ticket, evaluation=evaluation)
    level = logging.INFO if closed.reason == "filtered" else logging.WARNING  # what the run's settings ask for
    log.log(level, "domain %s, %s closed: %s", closed.domain, key, reason)
    if closed.ticket > 0:
        record = msgspec.structs.replace(closed, detail=detail)
        await bus.publish(result_log(evaluation=evaluation), record, ticket=closed.ticket, message_id=key)
    if keep:
        await bus.dead_letter(stream, seq=delivery.seq, ticket=closed.ticket, reason=reason, data=delivery.data)
    await delivery.ack()
