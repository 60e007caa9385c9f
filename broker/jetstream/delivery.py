"""One message received from a work queue: its content, acknowledgement and return."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from broker.contract import codec, wire
from broker.contract.sizes import Buffer
from broker.errors import WireError
from broker.jetstream.ack_progress import AckProgress
from broker.nats.client import Msg
from broker.nats.connection import PAUSE_S, NatsLink
from broker.nats.nats_errors import Disconnected, NoResponders
from broker.system.aside import aside

if TYPE_CHECKING:
    from broker.jetstream.parts import GroupParts

log = logging.getLogger(__name__)

Decoded = tuple[wire.Message | None, str]  # message, or None and why it does not decode

ACK: Final = b"+ACK"
CONFIRM_WITHIN_S: Final = 5.0
CONFIRM_TRIES: Final = 3
UNHEARD_TRIES: Final = 10
UNHEARD_PAUSE_S: Final = 0.2
DEAD_BYTES: Final = 1 << 20  # in a dead letter
MAX_DIGITS: Final = 18  # of a number in a header; more may not fit into 64 bits


class Delivery:
    """One message of a work queue, held by this process until acknowledged; in-progress marks are
    sent until then.

    Attributes:
        message: the decoded message, None if it did not decode; a ``Parted`` until ``load`` was
            awaited.
        error: why it did not decode, else empty.
        ticket: from the TICKET_HEADER, 0 if absent or not a number.
        eval_step: from the EVAL_HEADER, -1 (training) if absent or not a number.
        seq: its sequence in the stream.
        num_delivered: how often it was delivered to any process, this delivery included.
        data: the received bytes; for a group in parts, at most what a dead letter holds.
    """

    __slots__ = (
        "_link", "_marks", "_parted", "_parts", "_settled", "_subject", "data", "error",
        "eval_step", "message",
        "num_delivered", "seq", "ticket",
    )  # fmt: skip

    @classmethod
    async def of(
        cls,
        link: NatsLink,
        marks: AckProgress,
        parts: GroupParts,
        types: tuple[type[wire.Message], ...],
        settled: Callable[[bool], None],
        message: Msg,
    ) -> Delivery:
        """Decode one message of a queue.

        Args:
            settled: called with True once it is acknowledged, with False when it is handed back.
        """
        decoded = await decode_aside(message.data, types)
        return cls(link, marks, parts, settled=settled, message=message, decoded=decoded)

    def __init__(
        self,
        link: NatsLink,
        marks: AckProgress,
        parts: GroupParts,
        settled: Callable[[bool], None],
        message: Msg,
        decoded: Decoded,
    ) -> None:
        self._link = link
        self._marks = marks
        self._parts = parts
        self._subject = message.reply
        self._settled = settled
        self.num_delivered, self.seq, _ = delivery_numbers(message.reply)
        self.ticket = ticket_of(message.headers)
        self.eval_step = number_of(message.headers, wire.EVAL_HEADER, -1)
        self.data = message.data
        self.message, self.error = decoded
        self._parted = self.message if isinstance(self.message, wire.Parted) else None

    @property
    def stored_at(self) -> float:
        """When the broker stored it, in unix seconds of its clock."""
        tokens = self._subject.split(".")
        return int(tokens[7 if len(tokens) == 9 else 9]) / 1e9

    @property
    def has_lapsed(self) -> bool:
        """Whether others may hold the message by now: what this process does with it is abandoned
        in silence.
        """
        return self._marks.has_lapsed(self._subject)

    @property
    def is_ours(self) -> bool:
        """Whether certainly no other process holds the message; required to end it without a
        result, see ``nak``.
        """
        return self._marks.is_proven(self._subject)

    def abandon(self) -> None:
        """Stop marking the message, and leave it to the broker to deliver it again."""
        self._marks.release(self._subject)
        self._settled(False)

    async def load(self) -> wire.Message | None:
        """Return the message, fetching a group in parts first and setting ``error`` and ``data`` to
        the group's.

        Raises:
            LostState: if there is no stream for parts.
        """
        if isinstance(self.message, wire.Parted):
            self.message, self.error, data = await self._parts.load(self.message)
            self.data = bytes(data[:DEAD_BYTES]) or self.data
        return self.message

    async def ack(self) -> None:
        """Acknowledge the message with confirmation and delete its parts; any number may be awaited
        at once.
        """
        try:
            await self._settle(ACK)
        finally:
            # after the confirmation: until then the message is still held
            self._marks.release(self._subject)
        self._settled(True)
        if self._parted is not None:
            await self._parts.drop(self._parted)

    async def nak(self, delay_s: float = 0.0) -> None:
        """Hand the message back for redelivery after a delay, unless others may hold it by now."""
        is_ours = self.is_ours
        self.abandon()
        if is_ours:
            await self._settle(nak_payload(delay_s))

    async def _settle(self, payload: bytes) -> None:
        """Send an acknowledgement; without a confirmation the message comes again, as at-least-once
        allows.
        """
        late = unheard = 0
        while late < CONFIRM_TRIES and unheard < UNHEARD_TRIES:
            await self._link.ready()
            try:
                await self._link.call(self._subject, payload, timeout_s=CONFIRM_WITHIN_S)
                return
            except Disconnected:
                await asyncio.sleep(PAUSE_S)
            except TimeoutError:
                late += 1
            # the queue is gone, or has no leader, or the server reads its accounts again
            except NoResponders:
                unheard += 1
                await asyncio.sleep(UNHEARD_PAUSE_S)
        log.warning(
            "message %d: the broker did not confirm %s; it may be delivered again",
            self.seq,
            payload.decode(),
        )


def delivery_numbers(ack_subject: str) -> tuple[int, int, int]:
    """Return (times delivered, stream sequence, consumer sequence) from an ack subject."""
    tokens = ack_subject.split(".")
    first = 4 if len(tokens) == 9 else 6  # longer with a JetStream domain and account in it
    return int(tokens[first]), int(tokens[first + 1]), int(tokens[first + 2])


def stored_ns(ack_subject: str) -> int:
    """Return the unix time in ns at which a message was stored, from its ack subject."""
    tokens = ack_subject.split(".")
    return int(tokens[7 if len(tokens) == 9 else 9])


def ticket_of(headers: dict[str, str] | None) -> int:
    """Return the number in the TICKET_HEADER, 0 if absent or not a number."""
    return number_of(headers, wire.TICKET_HEADER, 0)


def number_of(headers: dict[str, str] | None, name: str, otherwise: int) -> int:
    """Return the natural number in a header, ``otherwise`` if the header is absent or holds
    something else.
    """
    text = headers.get(name, "") if headers else ""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS else otherwise


def decode_message(data: Buffer, types: tuple[type[wire.Message], ...]) -> Decoded:
    """Return the message, or None and why it does not decode."""
    try:
        return codec.decode(data, *types), ""
    except WireError as error:
        return None, str(error)


async def decode_aside(data: Buffer, types: tuple[type[wire.Message], ...]) -> Decoded:
    """Decode as ``decode`` does, a large message in a thread."""
    return await aside(len(data), partial(decode_message, data, types))


def nak_payload(delay_s: float) -> bytes:
    """Return a negative acknowledgement, with the delay in nanoseconds if there is one."""
    if delay_s <= 0:
        return b"-NAK"
    return b"-NAK " + json.dumps({"delay": int(delay_s * 1e9)}).encode()
