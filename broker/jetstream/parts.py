"""Stores large groups in parts, in a separate stream before the record that refers to them, and
fetches them.

The parts of one upload, concatenated, are the wire encoding of its group. Their subjects contain
the ticket, so that they can be purged by ticket; see docs/adr/0009-large-groups-travel-in-parts.md.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Final

import msgspec

from broker.contract import codec, wire
from broker.contract.sizes import HEADER_BYTES, INLINE_BYTES, LEAST_PART_BYTES, PART_BYTES, Buffer
from broker.contract.streams import PARTS
from broker.errors import TooLarge, WireError
from broker.jetstream.api import TIMEOUTS_S, call_api, find_message
from broker.jetstream.flight_window import FlightWindow
from broker.jetstream.publish import MESSAGE_ID, require_stream, store_message
from broker.nats.connection import PAUSE_S, NatsLink
from broker.nats.nats_errors import Disconnected, NoResponders
from broker.system.aside import aside

log = logging.getLogger(__name__)

IN_FLIGHT: Final = 4  # parts that one process stores at once
MOST_REQUESTS: Final = 64  # for parts of one group at once, within the window of bytes
NO_STREAM_AFTER_S: Final = 10.0
# kinds of tickets, numbered separately
TRAINING = "t"
EVALUATION = "e"


@dataclass(frozen=True, slots=True)
class FetchedParts:
    """The encoding of a group as it arrived, not decoded yet."""

    data: bytearray
    digest: str  # of the data
    error: str = ""  # why the parts could not be fetched


class GroupParts:
    """The parts of one run.

    Args:
        run: returns the run's name, which may be known only after connecting.
    """

    def __init__(self, link: NatsLink, run: Callable[[], str]) -> None:
        self._link = link
        self._run = run
        self._out = asyncio.Semaphore(IN_FLIGHT)
        self._in = FlightWindow()
        self._num_fetched = 0

    @property
    def inline_bytes(self) -> int:
        """The largest encoding that is stored in the record itself."""
        return min(INLINE_BYTES, self._link.max_payload - HEADER_BYTES)

    async def put(self, group: wire.Group, data: bytes) -> wire.Parted:
        """Store the encoding of a group; return the record for it when the broker has confirmed
        every part.

        Raises:
            TooLarge: if the broker's messages are too small for parts.
            LostState: if there is no stream for parts.
        """
        part_bytes = min(PART_BYTES, self._link.max_payload - HEADER_BYTES)
        upload = secrets.token_hex(8)
        if part_bytes < LEAST_PART_BYTES:
            limit = self._link.max_payload
            raise TooLarge(
                f"Group is {len(data)} bytes, and the broker takes messages of {limit} bytes only"
            )
        parted = wire.Parted(
            ticket=group.ticket, domain=group.domain, upload=upload, size=len(data),
            part_bytes=part_bytes,
            digest="", eval_step=group.eval_step,
        )  # fmt: skip
        view = memoryview(data)

        async def send(number: int) -> None:
            part = _slice_part(view, parted, number)
            headers = {
                MESSAGE_ID: f"{parted.upload}.{number}",
                wire.TICKET_HEADER: str(parted.ticket),
            }
            async with self._out:
                await store_message(
                    self._link,
                    PARTS.stream_name(self._run()),
                    self._subject(parted, number),
                    data=part,
                    headers=headers,
                )

        digesting = aside(len(data), partial(hash_encoding, data))
        sending = _run_each(parted.num_parts, send, IN_FLIGHT)
        data_digest, _ = await asyncio.gather(digesting, sending)
        return msgspec.structs.replace(parted, digest=data_digest)

    async def fetch(self, parted: wire.Parted) -> FetchedParts:
        """Return the encoding of a record's group; earlier calls have priority on the wire.

        Raises:
            LostState: if there is no stream for parts.
        """
        try:
            return FetchedParts(*await self._get(parted))
        except WireError as error:
            return FetchedParts(bytearray(), "", str(error))

    async def load(
        self, parted: wire.Parted, fetching: Awaitable[FetchedParts] | None = None
    ) -> tuple[wire.Group | None, str, bytearray]:
        """Return the group of a record, the reason if it cannot be loaded, and its encoding.

        Args:
            fetching: the encoding, if ``fetch`` was called already.

        Raises:
            LostState: if there is no stream for parts.
        """
        fetched = await (self.fetch(parted) if fetching is None else fetching)
        data = fetched.data
        try:
            if fetched.error:
                raise WireError(fetched.error)
            return (
                await aside(len(data), partial(put_together, parted, data, fetched.digest)),
                "",
                data,
            )
        except WireError as error:
            return (
                None,
                f"Group in parts, ticket {parted.ticket}, upload {parted.upload}: {error}",
                bytearray(),
            )

    async def drop(self, parted: wire.Parted) -> None:
        """Delete one upload that is no longer needed, if this process may; the learner deletes what
        remains.
        """
        if self._link.login.manages:
            await self._purge(_ticket_kind(parted), str(parted.ticket), parted.upload)

    async def drop_others(self, parted: wire.Parted) -> None:
        """Delete the other uploads of a ticket: of earlier reward pools, later records and
        processes that ended.
        """
        kind = _ticket_kind(parted)
        ticket = str(parted.ticket)
        for upload in {subject.split(".")[5] for subject in await self._subjects(kind, ticket)} - {
            parted.upload
        }:
            await self._purge(kind, ticket, upload)

    async def _purge(self, *first: str) -> None:
        subjects = PARTS.all_subjects(self._run(), *first)
        purge = json.dumps({"filter": subjects}).encode()
        try:
            await self._link.send(f"$JS.API.STREAM.PURGE.{PARTS.stream_name(self._run())}", purge)
        except Disconnected:
            log.debug("%s stays until the next trimming", subjects)

    async def trim(self, kind: str, keep: Callable[[int], bool]) -> int:
        """Delete the parts of every ticket of one kind that ``keep`` rejects; return how many
        tickets had some.
        """
        run = self._run()
        name = PARTS.stream_name(run)
        tickets = ended_tickets(await self._subjects(kind), keep)
        for ticket in tickets:
            await call_api(
                self._link,
                f"STREAM.PURGE.{name}",
                {"filter": PARTS.all_subjects(run, kind, str(ticket))},
            )
        return len(tickets)

    async def _subjects(self, *first: str) -> list[str]:
        run = self._run()
        subjects = list[str]()
        while True:
            body = {"subjects_filter": PARTS.all_subjects(run, *first), "offset": len(subjects)}
            answer = await call_api(self._link, f"STREAM.INFO.{PARTS.stream_name(run)}", body)
            page = answer["state"].get("subjects") or {}
            subjects += page
            if not page or len(subjects) >= int(answer.get("total", 0)):
                return subjects

    def _subject(self, parted: wire.Parted, number: int) -> str:
        return PARTS.subject(
            self._run(), f"{_ticket_kind(parted)}.{parted.ticket}.{parted.upload}.{number}"
        )

    async def _get(self, parted: wire.Parted) -> tuple[bytearray, str]:
        """Return the encoding and its digest, computed in a thread while further parts arrive."""
        data = bytearray(parted.size)
        hashed = sha256()
        view = memoryview(data)
        loop = asyncio.get_running_loop()
        arrivals = [loop.create_future() for _ in range(parted.num_parts)]
        self._num_fetched += 1
        owner = self._num_fetched

        async def receive(number: int) -> None:
            place = _slice_part(view, parted, number)
            async with self._in.slot(owner, len(place)):
                part = await self._part(self._subject(parted, number))
            if part is None:
                raise WireError(f"part {number} of {parted.num_parts} is missing")
            if len(part) != len(place):
                raise WireError(
                    f"part {number} of {parted.num_parts} has {len(part)} bytes; must be "
                    f"{len(place)}"
                )
            place[:] = part
            arrivals[number].set_result(None)

        async def follow() -> None:
            for number, arrival in enumerate(arrivals):
                await arrival
                await aside(parted.size, partial(hashed.update, _slice_part(view, parted, number)))

        following = asyncio.create_task(follow())
        try:
            await _run_each(parted.num_parts, receive, MOST_REQUESTS)
            await following
        finally:
            following.cancel()
            # the thread may still read the returned buffer
            await asyncio.gather(following, return_exceptions=True)
        return data, _short_hex(hashed.digest())

    async def _part(self, subject: str) -> bytes | None:
        """Return one part, None if it is not stored."""
        name = PARTS.stream_name(self._run())
        loop = asyncio.get_running_loop()
        attempts = 0
        since = loop.time()
        while True:
            await self._link.ready()
            timeout_s = TIMEOUTS_S[min(attempts, len(TIMEOUTS_S) - 1)]
            try:
                answer = await self._link.call(
                    f"$JS.API.DIRECT.GET.{name}.{subject}", b"", timeout_s=timeout_s
                )
            except Disconnected:
                await asyncio.sleep(PAUSE_S)
                continue
            except TimeoutError:
                attempts += 1
                log.warning("%s: no answer within %g s; retrying", subject, timeout_s)
                self._link.doubt("parts", timeout_s)
                continue
            except NoResponders:
                self._link.doubt("parts")
                if loop.time() - since > NO_STREAM_AFTER_S:
                    await require_stream(self._link, name, subject)
                    since = loop.time()
                await asyncio.sleep(0.1)
                continue
            self._link.trust("parts")
            if "Status" not in (answer.headers or {}):
                return answer.data
            # from the leader: a replica may lack the part
            entry = await find_message(self._link, name, last_of=subject)
            return entry.data if entry is not None else None


def _ticket_kind(parted: wire.Parted) -> str:
    return EVALUATION if parted.eval_step >= 0 else TRAINING


def hash_encoding(data: Buffer) -> str:
    """Return the digest of an encoding; SHA-256 is several times faster than BLAKE2 on most
    processors.
    """
    return _short_hex(sha256(data).digest())


def _short_hex(whole: bytes) -> str:
    return whole[:16].hex()


def _slice_part(view: memoryview, parted: wire.Parted, number: int) -> memoryview:
    return view[number * parted.part_bytes : (number + 1) * parted.part_bytes]


def ended_tickets(subjects: Iterable[str], keep: Callable[[int], bool]) -> list[int]:
    """Return the tickets in these subjects of parts that ``keep`` rejects, in order."""
    return sorted(
        ticket
        for ticket in {int(subject.split(".")[4]) for subject in subjects}
        if not keep(ticket)
    )


def put_together(parted: wire.Parted, data: bytearray, data_digest: str) -> wire.Group:
    """Decode a group from its encoding, which has the digest ``data_digest``.

    Raises:
        WireError: if it is damaged, not a group, or belongs to another ticket.
    """
    if data_digest != parted.digest:
        raise WireError(f"its bytes are damaged: digest {data_digest}; must be {parted.digest}")
    group = codec.decode(data, wire.Group)
    ticket = group.ticket
    step = group.eval_step
    domain = group.domain
    if (ticket, step, domain) != (parted.ticket, parted.eval_step, parted.domain):
        raise WireError(
            f"it holds the group of ticket {ticket}, domain {domain}, evaluation step {step}"
        )
    return group


async def _run_each(count: int, work: Callable[[int], Awaitable[None]], at_once: int) -> None:
    """Await ``work`` for each number below ``count``, several at once, until the first error."""
    numbers = iter(range(count))

    async def run() -> None:
        for number in numbers:
            await work(number)

    tasks = [asyncio.create_task(run()) for _ in range(min(at_once, count))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
