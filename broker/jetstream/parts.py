"""Bodies of large groups, in parts: stored in a stream of their own before the record that names them, fetched on
demand.

The parts of one upload, one after the other, are the wire encoding of its group. Their subjects hold the ticket, so
that they are purged by ticket; see docs/adr/0009-large-groups-travel-in-parts.md.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from hashlib import sha256
from typing import Final

import msgspec

from broker.contract import codec, wire
from broker.contract.sizes import HEADER_BYTES, INLINE_BYTES, LEAST_PART_BYTES, PART_BYTES, Buffer
from broker.contract.streams import PARTS
from broker.errors import TooLarge, WireError
from broker.jetstream.api import TIMEOUTS_S, ask, find
from broker.jetstream.publish import MESSAGE_ID, require_stream, store
from broker.nats.connection import PAUSE_S, NatsLink
from broker.nats.nats_errors import Disconnected, NoResponders
from broker.system.aside import aside

log = logging.getLogger(__name__)

IN_FLIGHT: Final = 4  # parts of one process on their way at once, in each direction
NO_STREAM_AFTER_S: Final = 10.0
TRAINING, EVALUATION = "t", "e"  # which tickets a number counts: each kind has numbers of its own


class GroupParts:
    """The parts of one run.

    Args:
        run: gives the run's name, which may be known only after connecting.
    """

    def __init__(self, link: NatsLink, run: Callable[[], str]) -> None:
        self._link, self._run = link, run
        self._out, self._in = asyncio.Semaphore(IN_FLIGHT), asyncio.Semaphore(IN_FLIGHT)

    @property
    def inline_bytes(self) -> int:
        """The largest encoding that travels in the record itself."""
        return min(INLINE_BYTES, self._link.max_payload - HEADER_BYTES)

    async def put(self, group: wire.Group, data: bytes) -> wire.Parted:
        """Store the encoding of a group; returns what stands for it once the broker has confirmed every part.

        Raises:
            TooLarge: the broker takes too few bytes in one message.
            LostState: there is no stream for parts.
        """
        part_bytes = min(PART_BYTES, self._link.max_payload - HEADER_BYTES)
        if part_bytes < LEAST_PART_BYTES:
            raise TooLarge(
                f"Group is {len(data)} bytes, and the broker takes messages of {self._link.max_payload} bytes only"
            )
        parted = wire.Parted(
            ticket=group.ticket, domain=group.domain, upload=secrets.token_hex(8), size=len(data),
            part_bytes=part_bytes,
            digest="", eval_step=group.eval_step,
        )  # fmt: skip
        view = memoryview(data)

        async def send(number: int) -> None:
            part = _place(view, parted, number)
            headers = {MESSAGE_ID: f"{parted.upload}.{number}", wire.TICKET_HEADER: str(parted.ticket)}
            await store(self._link, PARTS.stream_name(self._run()), self._subject(parted, number), part, headers)

        found, _ = await asyncio.gather(
            aside(len(data), partial(digest, data)), _each(parted.num_parts, send, self._out)
        )
        return msgspec.structs.replace(parted, digest=found)

    async def load(self, parted: wire.Parted) -> tuple[wire.Group | None, str, bytearray]:
        """The group that a record stands for and its encoding, or why there is none.

        Raises:
            LostState: there is no stream for parts.
        """
        try:
            data, found = await self._get(parted)
            return await aside(len(data), partial(put_together, parted, data, found)), "", data
        except WireError as error:
            return None, f"Group in parts, ticket {parted.ticket}, upload {parted.upload}: {error}", bytearray()

    async def drop(self, parted: wire.Parted) -> None:
        """Delete one upload that nobody needs any more; best effort, trimming finds what is left."""
        kind = EVALUATION if parted.eval_step >= 0 else TRAINING
        purge = json.dumps(
            {"filter": PARTS.all_subjects(self._run(), kind, str(parted.ticket), parted.upload)}
        ).encode()
        try:
            await self._link.send(f"$JS.API.STREAM.PURGE.{PARTS.stream_name(self._run())}", purge)
        except Disconnected:
            log.debug("parts of ticket %d stay until the next trimming", parted.ticket)

    async def trim(self, kind: str, keep: Callable[[int], bool]) -> int:
        """Delete the parts of every ticket of one kind that is not to be kept; how many tickets had some."""
        run = self._run()
        name, ended = PARTS.stream_name(run), ended_tickets(await self._subjects(kind), keep)
        for ticket in ended:
            await ask(self._link, f"STREAM.PURGE.{name}", {"filter": PARTS.all_subjects(run, kind, str(ticket))})
        return len(ended)

    async def _subjects(self, kind: str) -> list[str]:
        """Every subject of the parts of one kind of tickets."""
        run, found = self._run(), list[str]()
        while True:
            body = {"subjects_filter": PARTS.all_subjects(run, kind), "offset": len(found)}
            answer = await ask(self._link, f"STREAM.INFO.{PARTS.stream_name(run)}", body)
            page = answer["state"].get("subjects") or {}
            found += page
            if not page or len(found) >= int(answer.get("total", 0)):
                return found

    def _subject(self, parted: wire.Parted, number: int) -> str:
        kind = EVALUATION if parted.eval_step >= 0 else TRAINING
        return PARTS.subject(self._run(), f"{kind}.{parted.ticket}.{parted.upload}.{number}")

    async def _get(self, parted: wire.Parted) -> tuple[bytearray, str]:
        """The encoding and its digest, which is computed in a thread while parts still come."""
        data, hashed = bytearray(parted.size), sha256()
        view, loop = memoryview(data), asyncio.get_running_loop()
        came = [loop.create_future() for _ in range(parted.num_parts)]

        async def receive(number: int) -> None:
            place = _place(view, parted, number)
            part = await self._part(self._subject(parted, number))
            if part is None:
                raise WireError(f"part {number} of {parted.num_parts} is not there")
            if len(part) != len(place):
                raise WireError(f"part {number} of {parted.num_parts} has {len(part)} bytes; must be {len(place)}")
            place[:] = part
            came[number].set_result(None)

        async def follow() -> None:
            for number, one in enumerate(came):
                await one
                await aside(parted.size, partial(hashed.update, _place(view, parted, number)))

        following = asyncio.create_task(follow())
        try:
            await _each(parted.num_parts, receive, self._in)
            await following
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)  # the thread may be reading what is given away here
        return data, _text(hashed.digest())

    async def _part(self, subject: str) -> bytes | None:
        """One part, None when it is not stored."""
        name = PARTS.stream_name(self._run())
        loop = asyncio.get_running_loop()
        attempts, since = 0, loop.time()
        while True:
            await self._link.ready()
            timeout_s = TIMEOUTS_S[min(attempts, len(TIMEOUTS_S) - 1)]
            try:
                answer = await self._link.call(f"$JS.API.DIRECT.GET.{name}.{subject}", b"", timeout_s=timeout_s)
            except Disconnected:
                await asyncio.sleep(PAUSE_S)
                continue
            except TimeoutError:
                attempts += 1
                log.warning("%s: no answer within %g s; asking again", subject, timeout_s)
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
            # a replica that answers may lack what the leader has confirmed
            found = await find(self._link, name, last_of=subject)
            return found.data if found is not None else None


def digest(data: Buffer) -> str:
    """Of a whole encoding; SHA-256 because most processors compute it several times as fast as BLAKE2."""
    return _text(sha256(data).digest())


def _text(whole: bytes) -> str:
    return whole[:16].hex()


def _place(view: memoryview, parted: wire.Parted, number: int) -> memoryview:
    """The bytes of one part."""
    return view[number * parted.part_bytes : (number + 1) * parted.part_bytes]


def ended_tickets(subjects: Iterable[str], keep: Callable[[int], bool]) -> list[int]:
    """The tickets that these subjects of parts belong to, in order, without those to be kept."""
    return sorted(ticket for ticket in {int(subject.split(".")[4]) for subject in subjects} if not keep(ticket))


def put_together(parted: wire.Parted, data: bytearray, found: str) -> wire.Group:
    """The group whose encoding this is, with this digest.

    Raises:
        WireError: it is damaged, no group, or another ticket's.
    """
    if found != parted.digest:
        raise WireError(f"its bytes are damaged: digest {found}; must be {parted.digest}")
    group = codec.decode(data, wire.Group)
    if (group.ticket, group.eval_step, group.domain) != (parted.ticket, parted.eval_step, parted.domain):
        raise WireError(
            f"it holds the group of ticket {group.ticket}, domain {group.domain}, evaluation step {group.eval_step}"
        )
    return group


async def _each(count: int, work: Callable[[int], Awaitable[None]], window: asyncio.Semaphore) -> None:
    """Do some work for each number below ``count``, in order, as many at once as the window allows; the first error
    ends all.
    """
    numbers = iter(range(count))

    async def run() -> None:
        for number in numbers:
            async with window:
                await work(number)

    tasks = [asyncio.create_task(run()) for _ in range(min(IN_FLIGHT, count))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
