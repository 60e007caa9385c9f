"""One process's access to a run's streams: publish, work queues, logs, last values, key-value
buckets.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from broker.contract import codec, wire
from broker.contract.permissions import OPERATOR
from broker.contract.sizes import HEADER_BYTES, Buffer
from broker.contract.streams import (
    ACK_WAIT_S,
    DEAD,
    EPISODES,
    EVALS,
    RUNS,
    STREAMS,
    Stream,
    StreamKind,
    require_own,
    ticket_key,
)  # fmt: skip
from broker.errors import LostState, StoreFull, TooLarge, WireError
from broker.identity.login import Login, find_login
from broker.jetstream import provision
from broker.jetstream.ack_progress import AckProgress
from broker.jetstream.api import StoredEntry, call_api, find_message, stream_bounds
from broker.jetstream.consumers import consumer_settings, ensure_consumer, find_consumer
from broker.jetstream.delivery import (
    DEAD_BYTES,
    Decoded,
    Delivery,
    decode_aside,
    decode_message,
    ticket_of,
)
from broker.jetstream.kv import KeyValue
from broker.jetstream.log_reader import follow_stream
from broker.jetstream.news import newer_values
from broker.jetstream.parts import EVALUATION, TRAINING, GroupParts
from broker.jetstream.provision import REPLICAS_IN_CLUSTER, ensure_stream, stream_config
from broker.jetstream.publish import EXPECTED_LAST_SEQ, MESSAGE_ID, store_message
from broker.jetstream.read_ahead import LogWindow, PendingRecord
from broker.jetstream.reserve import release_reserve
from broker.jetstream.stream_counts import StreamCounts
from broker.jetstream.work_queue import WorkQueue
from broker.nats.connection import NatsLink
from broker.nats.nats_errors import ApiError
from broker.system.aside import aside

__all__ = ["Bus", "Delivery", "KeyValue", "LogRecord", "WorkQueue"]

log = logging.getLogger(__name__)

MAX_IN_FLIGHT: Final = 1024  # unconfirmed publishes of one process
NO_CONSUMER: Final = 10014
DELETE_FAILED: Final = (10037, 10043, 10057)


@dataclass(frozen=True, slots=True)
class LogRecord:
    """One entry of a log; exactly one of ``message`` and ``error`` is set."""

    seq: int
    message: wire.Message | None  # a ``Parted`` only if the reader did not want its group
    error: str  # why it did not decode
    ticket: int  # from the TICKET_HEADER, 0 if absent
    data: bytes | bytearray  # the message's encoding; for a group in parts, the bytes of all parts
    parted: wire.Parted | None = None  # the record itself, if the group was fetched from its parts


class Bus:
    """One process's connection to the broker for one run. Reconnects forever; publishes wait while
    disconnected.

    Attributes:
        run: the run; may be set once after ``connect``, if its name has to be found first.
        name: the process's name in the broker's lists and in dead letters.
        replicas: servers that hold each message of streams created from now on; None: three in a
            cluster, else one.
        hang_after_s: in-progress marks stop if the event loop has not turned for this long.
        link: the underlying connection, for messages that are not stored.
        counts: messages that went through this connection.
    """

    def __init__(self, link: NatsLink, run: str) -> None:
        self.run = run
        self.link = link
        self.name = link.name
        self.replicas: int | None = None
        self.hang_after_s = 30.0
        self.counts = StreamCounts()
        self._marks = AckProgress(link.url, link.name, lambda: self.hang_after_s, link.find_login)
        self._parts = GroupParts(link, lambda: self.run)
        self._in_flight = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._buckets: dict[tuple[str, str], KeyValue] = {}
        self._queues: dict[tuple[str, str], asyncio.Task[WorkQueue]] = {}
        self._dropping: set[asyncio.Task[None]] = set()

    @classmethod
    async def connect(
        cls,
        url: str,
        run: str,
        *,
        name: str,
        role: str = OPERATOR,
        login: Login | None = None,
        deadline_s: float | None = None,
    ) -> Bus:
        """Connect, retrying until the deadline and logging that every few seconds.

        Args:
            role: whose permissions to use: a process of the run, or the operator.
            login: from a join token; None: looked up by the address.

        Raises:
            BrokerUnreachable: if no broker answers within ``deadline_s`` (None: no limit), or it
                refuses the key.
        """
        link = NatsLink(
            url, name, (lambda: login) if login is not None else partial(find_login, url, role, run)
        )
        await link.open(deadline_s)
        if (limit := link.max_payload) < wire.MAX_PAYLOAD_BYTES + HEADER_BYTES:
            log.warning(
                "the broker's max_payload is %d bytes; larger requests fail (set max_payload: 9MB)",
                limit,
            )
        return cls(link, run)

    async def close(self) -> None:
        """Stop in-progress marks and disconnect; pending calls raise Disconnected, readers end."""
        for task in (*self._queues.values(), *self._dropping):
            task.cancel()
        await self._marks.close()
        await self.link.close()

    async def ensure_streams(self, streams: Collection[Stream] = STREAMS) -> None:
        """Create those of this run's streams and buckets that do not exist, or wait for the learner
        to do so.

        Args:
            streams: of a program of your own, with those of the table that it uses.

        Raises:
            UserError: if the broker has no JetStream or no room for another run, or its cluster is
                too old.
            ConfigError: if a stream has a name that means another one.
        """
        link = self.link
        require_own(streams)
        provision.require_safe_cluster(link)
        await asyncio.gather(*(self._ensure(stream, self.run) for stream in streams))

    async def ensure_memory(self) -> None:
        """Create again what the broker kept in memory, as after its restart, or wait for the
        learner to do so.
        """
        await asyncio.gather(
            *(self._ensure(stream, self.run) for stream in STREAMS if stream.memory)
        )

    async def ensure_consumers(
        self, stream: Stream, keys: Collection[str], ack_wait_s: float = ACK_WAIT_S
    ) -> None:
        """Create the consumers of a work queue's keys; hubs may only use them."""
        name = stream.stream_name(self.run)
        configs = (
            consumer_settings(key, stream.all_subjects(self.run, key), ack_wait_s) for key in keys
        )
        await asyncio.gather(*(ensure_consumer(self.link, name, config) for config in configs))

    async def _ensure(self, stream: Stream, run: str) -> None:
        replicas = self.replicas or (REPLICAS_IN_CLUSTER if self.link.clustered else 1)
        config = stream_config(stream, run, replicas)
        if config is None:
            return
        role = self.link.login.role
        if not self.link.login.manages:
            if stream.reads(role) or stream.writes(role):
                await provision.wait_for_stream(self.link, config["name"])
        # faster than a creation request
        elif not await provision.stream_exists(self.link, config["name"]):
            await ensure_stream(self.link, config)

    async def runs(self) -> list[str]:
        """Return the runs that have streams on the broker; of those, a process of a run sees only
        its own.
        """
        if not self.link.login.manages_all:
            return [self.run]
        ends = f"_{RUNS.name}"
        names = await provision.stream_names(self.link, "$KV.>")
        return sorted(
            name.removeprefix("KV_rl_").removesuffix(ends) for name in names if name.endswith(ends)
        )

    async def delete_streams(self, streams: Collection[Stream] = STREAMS) -> None:
        """Delete this run's streams with all their messages."""
        for stream in streams:
            if (config := stream_config(stream, self.run)) is not None:
                await provision.delete_stream(self.link, config["name"])

    async def publish(
        self,
        stream: Stream,
        message: wire.Message,
        *,
        key: str = "",
        ticket: int = 0,
        message_id: str = "",
        expected_last_seq: int | None = None,
        is_essential: bool = False,
        may_send: Callable[[], bool] = lambda: True,
    ) -> int | None:
        """Store one message, retrying until the broker confirms it; return its sequence.

        A group too large for one message is stored in parts, followed by a ``Parted`` that refers
        to them. ``message_id`` lets the broker drop a repetition within two minutes. None:
        ``expected_last_seq`` did not match, or ``may_send``, which is called before each attempt,
        returned False. ``is_essential`` uses the run's reserve if the broker is full; only the
        learner and the operator may purge it.

        Raises:
            TooLarge: if the message is larger than the wire or the broker allows; nothing was sent.
            WireError: if the message breaks its own rules; nothing was sent.
            StoreFull: if the message is a dead letter, and the broker is full.
            LostState: if the broker has no such stream.
        """
        data = await aside(_encoded_size(message), partial(codec.encode, message))
        if (
            isinstance(message, wire.Group)
            and wire.Parted in stream.messages
            and len(data) > self._parts.inline_bytes
        ):
            data = codec.encode(await self._parts.put(message, data))
        if len(data) + HEADER_BYTES > (limit := self.link.max_payload):
            raise TooLarge(
                f"{type(message).__name__} is {len(data)} bytes, the broker's limit is {limit}"
            )
        headers = {MESSAGE_ID: message_id or f"{self.link.inbox}.{self.link.next_token()}"}
        if ticket:
            headers[wire.TICKET_HEADER] = str(ticket)
        if (eval_step := getattr(message, "eval_step", -1)) >= 0:
            headers[wire.EVAL_HEADER] = str(eval_step)
        if stream is EPISODES:
            number = ticket or getattr(message, "ticket", 0)
            key = f"{key}.{ticket_key(number, evaluation=eval_step >= 0)}"
        if expected_last_seq is not None:
            headers[EXPECTED_LAST_SEQ] = str(expected_last_seq)
        async with self._in_flight:
            name = stream.stream_name(self.run)
            subject = stream.subject(self.run, key)
            essential = is_essential or stream.essential or isinstance(message, wire.RulesChange)
            make_room = partial(release_reserve, self.link, self.run) if essential else None
            if stream.signed:
                headers |= self.link.login.sign(self.run, subject, data)
            seq = await store_message(
                self.link,
                name,
                subject,
                data=data,
                headers=headers,
                make_room=make_room,
                may_send=may_send,
                waits_for_room=stream is not DEAD,
            )
        self.counts.published[stream.name] += seq is not None
        return seq

    async def last_seq(self, stream: Stream) -> int:
        """Return the sequence of the newest message ever stored, 0 if none."""
        return (await self.bounds(stream))[1]

    async def first_seq(self, stream: Stream) -> int:
        """Return the sequence of the oldest message kept; one past the newest if none is kept."""
        return (await self.bounds(stream))[0]

    async def bounds(self, stream: Stream, *, known: int = 0) -> tuple[int, int]:
        """Return the oldest kept and the newest ever stored sequence; (last + 1, last) if none is
        kept.

        Args:
            known: a sequence that was stored; waits for replicas that are behind it, see
                ``api.bounds``.
        """
        return await stream_bounds(self.link, stream.stream_name(self.run), known=known)

    async def missing(self, stream: Stream, seqs: Collection[int]) -> set[int]:
        """Return those of these sequences that were stored and are no longer kept."""
        if not seqs:
            return set()
        state = (await self.info(stream, {"deleted_details": True}))["state"]
        deleted = set(state.get("deleted") or ())
        first = int(state["first_seq"])
        last = int(state["last_seq"])
        return {
            seq
            for seq in seqs
            if seq <= last and (seq < first or seq in deleted or not state["messages"])
        }

    async def info(self, stream: Stream, details: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return JetStream's description of a stream: its configuration and state, with the
        requested details.
        """
        return await call_api(self.link, f"STREAM.INFO.{stream.stream_name(self.run)}", details)

    async def depth(self, stream: Stream) -> dict[str, int]:
        """Return the unacknowledged messages per key of a work queue, or {'': messages kept} of a
        log.

        Of a key with several parts the first is meant.
        """
        if stream.kind is not StreamKind.WORK_QUEUE:
            return {"": int((await self.info(stream))["state"]["messages"])}
        state = (await self.info(stream, {"subjects_filter": stream.all_subjects(self.run)}))[
            "state"
        ]
        depths: Counter[str] = Counter()
        for subject, count in (state.get("subjects") or {}).items():
            depths[subject.split(".")[3]] += int(count)
        return dict(depths)

    async def trim(self, stream: Stream, before_seq: int) -> None:
        """Delete every message with a sequence below ``before_seq``."""
        if before_seq > 1:
            await call_api(
                self.link, f"STREAM.PURGE.{stream.stream_name(self.run)}", {"seq": before_seq}
            )

    async def delete(self, stream: Stream, seq: int) -> bool:
        """Delete one message by its sequence; return False if it is not there.

        A consumer that already holds it may still acknowledge it; it is not delivered again.
        """
        name = stream.stream_name(self.run)
        try:
            await call_api(self.link, f"STREAM.MSG.DELETE.{name}", {"seq": seq, "no_erase": True})
        except ApiError as error:
            # servers use several codes, including a general one, for a missing message
            if (
                error.err_code not in DELETE_FAILED
                or await find_message(self.link, name, seq=seq) is not None
            ):
                raise
            return False
        return True

    async def remove_groups(self, number: int, *, evaluation: bool = False) -> None:
        """Delete the groups of a ticket from the queues of all reward pools; hubs that hold one may
        still end it.
        """
        subjects = EPISODES.all_subjects(self.run).removesuffix("*") + ticket_key(
            number, evaluation=evaluation
        )
        await call_api(
            self.link, f"STREAM.PURGE.{EPISODES.stream_name(self.run)}", {"filter": subjects}
        )

    async def last_delivered(self, stream: Stream, key: str) -> int:
        """Return the highest sequence of a work queue's key that was ever delivered, 0 if none."""
        name = stream.stream_name(self.run)
        consumer = key
        while True:
            try:
                info = await call_api(self.link, f"CONSUMER.INFO.{name}.{consumer}")
            except ApiError as error:
                if error.err_code != NO_CONSUMER:
                    raise
                config = await find_consumer(
                    self.link, name, key, stream.all_subjects(self.run, key)
                )
                if config is None or config["durable_name"] == consumer:
                    return 0
                consumer = config["durable_name"]  # created by another program
            else:
                return int(info["delivered"]["stream_seq"])

    async def trim_parts(self, log: Stream, keep: Callable[[int], bool]) -> int:
        """Delete the parts of every ticket of a log that ``keep`` rejects; return how many tickets
        had some.

        Args:
            log: SAMPLES or EVALS.
            keep: whether a record of this ticket may still be read or arrive.
        """
        return await self._parts.trim(EVALUATION if log is EVALS else TRAINING, keep)

    async def work_queue(self, stream: Stream, key: str) -> WorkQueue:
        """Return the queue of one key, the same object each time."""
        task = self._queues.get((stream.name, key))
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            task = self._queues[stream.name, key] = asyncio.create_task(
                self._open_queue(stream, key)
            )
        return await asyncio.shield(task)

    async def renew_queues(self) -> None:
        """Follow the settings of the consumers in use, which the learner may have changed."""
        tasks = [task for task in self._queues.values() if task.done() and not task.cancelled()]
        await asyncio.gather(*(task.result().renew() for task in tasks if task.exception() is None))

    async def _open_queue(self, stream: Stream, key: str) -> WorkQueue:
        queue = WorkQueue(
            self.link,
            self._marks,
            self._parts,
            counts=self.counts,
            stream=stream,
            run=self.run,
            key=key,
        )
        await queue.open()
        return queue

    async def read_log(
        self,
        stream: Stream,
        start_seq: int,
        *,
        wanted: Callable[[int], bool] = lambda _: True,
        window_bytes: int = 0,
    ) -> AsyncGenerator[LogRecord, None]:
        """Yield every record from ``start_seq`` on, in order, without gaps, across reconnects; wait
        at the end.

        A log with a size limit may have lost its oldest records; reading then starts at the oldest
        kept.

        Args:
            wanted: whether to fetch this ticket's group if it is stored in parts; called when the
                record's turn comes. Other records have the ``Parted`` as message; one whose parts
                are missing or damaged has an error.
            window_bytes: of coming records that are read, and groups that are fetched, ahead of
                their turn; ``wanted`` is then also called before it. 0: one record at a time.

        Raises:
            LostState: if the log ends before ``start_seq - 1``, has lost records it should have
                kept, or holds another record in the place of the newest that was read.
        """
        entries = self._log_entries(stream, start_seq)
        if not window_bytes:
            async with aclosing(entries):
                async for entry in entries:
                    yield await self.record(entry, stream, wanted)
            return
        window = LogWindow(entries, stream.messages, self._parts, wanted, window_bytes)
        async with aclosing(window.pending()) as records:
            async for pending in records:
                yield await self.record(pending.entry, stream, wanted, pending=pending)

    async def _log_entries(
        self, stream: Stream, start_seq: int
    ) -> AsyncGenerator[StoredEntry, None]:
        """Yield the entries of a log as they are stored; see ``read_log``."""
        name = stream.stream_name(self.run)
        following = max(start_seq, 1)
        newest = (0, 0)  # sequence and time of the last record that was yielded

        async def start() -> dict[str, Any]:
            read = following - 1
            first, last = await stream_bounds(self.link, name, known=read)
            if last < read:
                raise LostState(
                    f"{name} ends at {last}, but {read} was already read; the broker lost its store"
                )
            if first > following and not stream.max_bytes:
                raise LostState(
                    f"{name} starts at {first}, but {following} is not read yet; it was trimmed "
                    "too far"
                )
            seq, stored_ns = newest
            newest_entry = await find_message(self.link, name, seq=seq) if seq else None
            # in an older store, which has grown since
            if newest_entry is not None and newest_entry.stored_ns != stored_ns:
                problem = f"{name} holds another record {seq} than the one that was read"
                raise LostState(f"{problem}; the broker's store was replaced by an older one")
            return {"deliver_policy": "by_start_sequence", "opt_start_seq": following}

        async with aclosing(follow_stream(self.link, name, start)) as entries:
            async for entry in entries:
                # a replica back from a crash or a partition may lack messages that the others have
                skipped = range(following, entry.seq) if not stream.max_bytes else ()
                for seq in skipped:
                    log.warning(
                        "%s: %d is missing before %d; asking the stream's leader",
                        name,
                        seq,
                        entry.seq,
                    )
                    if (missed := await find_message(self.link, name, seq=seq)) is not None:
                        following = seq + 1
                        newest = (seq, missed.stored_ns)
                        yield missed
                if entry.seq >= following:
                    following = entry.seq + 1
                    newest = (entry.seq, entry.stored_ns)
                    yield entry

    async def record(
        self,
        entry: StoredEntry,
        stream: Stream,
        wanted: Callable[[int], bool] = lambda _: True,
        *,
        pending: PendingRecord | None = None,
    ) -> LogRecord:
        """Decode one entry of a log, with its parts if wanted; see ``read_log``.

        Args:
            pending: the entry as it was read ahead, if it was.
        """
        self.counts.consumed[stream.name] += 1
        decoded = pending.decoded if pending is not None else None
        message, error = decoded or await decode_aside(entry.data, stream.messages)
        data: bytes | bytearray = entry.data
        parted = None
        if isinstance(message, wire.Parted) and wanted(message.ticket):
            parted = message
            message, error, body = await self._parts.load(
                parted, pending.fetching if pending is not None else None
            )
            data = body or data
        return LogRecord(
            entry.seq,
            message,
            error,
            ticket=ticket_of(entry.headers),
            data=data,
            parted=parted,
        )

    def drop_other_parts(self, parted: wire.Parted) -> None:
        """Begin to delete a ticket's parts except those of this record, which must be the one that
        counts.

        Those of any other record may be the ones that count: a later reader of the log would find
        it without them. What is still there when this process ends is deleted with the ticket's
        parts, by ``trim_parts``.
        """
        task = asyncio.create_task(self._parts.drop_others(parted))
        self._dropping.add(task)
        task.add_done_callback(self._dropped)

    def _dropped(self, task: asyncio.Task[None]) -> None:
        self._dropping.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("parts that are no longer needed stay until the next trimming: %s", error)

    async def watch_last(self, stream: Stream) -> AsyncGenerator[wire.Message, None]:
        """Yield the newest value and every newer one; intermediate values may be skipped."""
        name = stream.stream_name(self.run)
        subject = stream.subject(self.run)

        async def read() -> tuple[int, int, StoredEntry] | None:
            entry = await find_message(self.link, name, last_of=subject)
            return None if entry is None else (entry.seq, entry.stored_ns, entry)

        async with aclosing(newer_values(self.link, subject, read)) as values:
            async for seq, entry in values:
                message, error = self._decode_signed(stream, entry)
                if message is None:
                    await self.dead_letter(stream, seq=seq, ticket=0, reason=error, data=entry.data)
                else:
                    yield message

    def _decode_signed(self, stream: Stream, entry: StoredEntry) -> Decoded:
        if stream.signed:
            try:
                self.link.login.stamp(self.run, entry.subject, entry.headers, entry.data)
            except WireError as error:
                return None, str(error)
        return decode_message(entry.data, stream.messages)

    def key_value(self, stream: Stream, run: str = "") -> KeyValue:
        """Return the bucket of a KV row, of this run or of another."""
        run = run or self.run

        async def malformed(key: str, seq: int, reason: str, data: bytes) -> None:
            log.warning("%s %s: %s", stream.name, key, reason)
            if run == self.run:
                await self.dead_letter(
                    stream, seq=seq, ticket=0, reason=f"{key}: {reason}", data=data
                )

        bucket = KeyValue(self.link, stream, run, malformed, partial(self._ensure, stream, run))
        return self._buckets.setdefault((stream.name, run), bucket)

    async def dead_letter(
        self, stream: Stream, *, seq: int, ticket: int, reason: str, data: Buffer
    ) -> None:
        """Store unusable bytes for the operator, once even if several readers report them.

        While the broker is full a letter is dropped with a warning: a learner that waited for room
        could not make any.
        """
        name = stream.name
        reason = " ".join(reason.split())
        letter = wire.DeadLetter(
            stream=name,
            sequence=seq,
            ticket=ticket,
            reason=reason,
            by=self.name,
            data=bytes(data[:DEAD_BYTES]),
        )
        try:
            await self.publish(
                DEAD,
                letter,
                key=name,
                ticket=ticket,
                message_id=f"dead.{name}.{seq}" if seq else "",
            )
        except StoreFull as error:
            log.warning("no dead letter for message %d of %s (%s): %s", seq, name, reason, error)


def _encoded_size(message: wire.Message) -> int:
    """Estimate the bytes to encode; 0 for small and for malformed messages."""
    if not isinstance(message, wire.Group):
        return 0
    try:
        # id, logprob and mask of each token
        return 9 * sum(len(trajectory.loss_mask.data) for trajectory in message.trajectories)
    except (TypeError, AttributeError):
        return 0  # encoding reports the error
