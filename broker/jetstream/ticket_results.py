"""Ends tickets: names the log and the deduplication id of a result, and publishes closings."""

from __future__ import annotations

import logging
from typing import Final

import msgspec

from broker.contract import wire
from broker.contract.streams import EVALS, SAMPLES, Stream, ticket_key
from broker.jetstream.bus import Bus, Delivery
from broker.system.fault import clean

__all__ = ["close_ticket", "result_log", "ticket_key"]

log = logging.getLogger(__name__)

DETAIL_CHARS: Final = 1000


def result_log(*, evaluation: bool) -> Stream:
    """Return the log in which a ticket ends."""
    return EVALS if evaluation else SAMPLES


async def close_ticket(
    bus: Bus,
    delivery: Delivery,
    stream: Stream,
    closed: wire.Closed,
    *,
    evaluation: bool,
    keep: bool = True,
) -> bool:
    """End a ticket without a group: publish the closing, store the message as a dead letter, then
    acknowledge.

    A delivery that other processes may hold by now is abandoned, and False returned: they decide
    about the ticket.

    Args:
        delivery: of the ticket or its group, taken from ``stream``.
        closed: its detail is cut to one line; with ticket 0 (unknown) it is not published, and the
            learner's timeout closes the ticket.
        keep: whether the operator is to have the message as a dead letter.
    """
    reason = clean(f"{closed.reason}: {closed.detail}", DETAIL_CHARS)
    detail = clean(closed.detail, DETAIL_CHARS)
    key = ticket_key(closed.ticket, evaluation=evaluation)
    if not delivery.is_ours:
        log.info("%s is not closed, because another process may hold it by now: %s", key, reason)
        delivery.abandon()
        return False
    # what the run's settings ask for
    level = logging.INFO if closed.reason == "filtered" else logging.WARNING
    log.log(level, "domain %s, %s closed: %s", closed.domain, key, reason)
    if closed.ticket > 0:
        record = msgspec.structs.replace(closed, detail=detail)
        results = result_log(evaluation=evaluation)
        seq = await bus.publish(
            results, record, ticket=closed.ticket, message_id=key, may_send=lambda: delivery.is_ours
        )
        if seq is None:  # the connection was away for too long
            delivery.abandon()
            return False
    if keep:
        await bus.dead_letter(
            stream, seq=delivery.seq, ticket=closed.ticket, reason=reason, data=delivery.data
        )
    await delivery.ack()
    return True
