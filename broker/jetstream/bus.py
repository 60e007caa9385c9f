"""The durable side: publish, fetch, acknowledge, read a log, last values, key-value. At-least-once, never less."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from broker.contract import codec, wire
from broker.contract.sizes import HEADER_BYTES, Buffer
from broker.contract.streams import DEAD, EVALS, STREAMS, Stream, StreamKind
from broker.errors import LostState, TooLarge
from broker.jetstream.ack_progress import AckProgress
from broker.jetstream.api import StoredEntry, ask, bounds, find
from broker.jetstream.consumers import find_consumer
from broker.jetstream.delivery import DEAD_BYTES, Delivery, decode, decode_aside, ticket_of
from broker.jetstream.kv import KeyValue
from broker.jetstream.log_reader import follow
from broker.jetstream.parts import EVALUATION, TRAINING, GroupParts
from broker.jetstream.provision import (
    REPLICAS_IN_CLUSTER,
    delete_stream,
    ensure_stream,
    require_safe_cluster,
    stream_config,
    stream_names,
)
from broker.jetstream.publish import EXPECTED_LAST_SEQ, MESSAGE_ID, store
from broker.jetstream.reserve import release
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
    """One entry of a log; exactly one of ``message`` and ``error`` is set.

    Attributes:
        message: a ``Parted`` only where the reader did not want its group.
        error: why it did not decode.
        ticket: from the TICKET_HEADER, 0 if absent.
        data: the message's encoding: of a group that came in parts, the parts' bytes.
    """

    seq: int
    message: wire.Message | None
    error: str
    ticket: int
    data: bytes | bytearray


class Bus:
    """One process's connection to the broker, for one run. Reconnects for ever; publishes wait while disconnected.

    Attributes:
        run: the run; may be set once after ``connect`` when its name had to be found first.
        name: who this is, in the broker's lists and in dead letters.
        replicas: servers that hold each message of the streams made from now on; None: three in a cluster, else one.
        hang_after_s: in-progress marks stop when the event loop has not turned for this long.
        link: the connection below, for what crosses the broker without being stored.
    """

    def __init__(self, link: NatsLink, run: str) -> None:
        self.run, self.link, self.name = run, link, link.name
        self.replicas: int | None = None
        self.hang_after_s = 30.0
        self._marks = AckProgress(link.url, link.name, lambda: self.hang_after_s)
        self._parts = GroupParts(link, lambda: self.run)
        self._in_flight = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._made: set[str] = set()  # streams that were there when this bus asked for all of them
        self._buckets: dict[str, KeyValue] = {}
        self._queues: dict[tuple[str, str], asyncio.Task[WorkQueue]] = {}

    @classmethod
    async def connect(cls, url: str, run: str, *, name: str, deadline_s: float | None = None) -> Bus:
        """Keep trying and say so every few seconds.

        Raises:
            BrokerUnreachable: no answer within ``deadline_s`` (None: for ever).
        """
        link = NatsLink(url, name)
        await link.open(deadline_s)
        if link.max_payload < wire.MAX_PAYLOAD_BYTES + HEADER_BYTES:
            log.warning(
                "the broker takes messages of %d bytes only; larger requests fail (set max_payload: 9MB there)",
                link.max_payload,
            )
        return cls(link, run)

    async def close(self) -> None:
        """Stop the in-progress marks and disconnect; pending calls raise Disconnected, readers end."""
        for task in self._queues.values():
            task.cancel()
        await self._marks.close()
        await self.link.close()

    # ---------------------------------------------------------------------------------------- streams

    async def ensure_streams(self) -> None:
        """Create this run's streams and buckets; does nothing for those that exist.

        Raises:
            UserError: no JetStream, no room for another run, or a cluster of servers that are too old.
        """
        require_safe_cluster(self.link)
        configs = [config for stream in STREAMS if (config := self._config(stream, self.run))]
        there = await stream_names(self.link, f"rl.{self.run}.>") | await stream_names(self.link, "$KV.>")
        await asyncio.gather(*(ensure_stream(self.link, config) for config in configs if config["name"] not in there))
        self._made = {config["name"] for config in configs}

    def _config(self, stream: Stream, run: str) -> dict[str, Any] | None:
        return stream_config(stream, run, self.replicas or (REPLICAS_IN_CLUSTER if self.link.clustered else 1))

    async def delete_streams(self) -> None:
        """Remove this run's streams with all that is in them, and its keys."""
        for stream in STREAMS:
            config = stream_config(stream, self.run)
            if config is None:
                continue
            if stream.kind is not StreamKind.KV:
                await delete_stream(self.link, config["name"])
            else:
                bucket = await self.key_value(stream)
                for key in await bucket.keys():
                    if key == self.run or key.startswith(f"{self.run}."):
                        await bucket.delete(key)

    # ---------------------------------------------------------------------------------------- publish

    async def publish(
        self,
        stream: Stream,
        message: wire.Message,
        *,
        key: str = "",
        ticket: int = 0,
        message_id: str = "",
        expected_last_seq: int | None = None,
    ) -> int | None:
        """Store one message and return its sequence once the broker has confirmed it; retried until it has.

        A group that is too large for one message is stored in parts, and then a ``Parted`` that stands for it.
        ``message_id`` lets the broker drop a repetition within two minutes. None: ``expected_last_seq`` did not match.

        Raises:
            TooLarge: the message is larger than the wire or the broker allows; nothing was sent.
            WireError: the message breaks its own rules; nothing was sent.
            LostState: the broker has no such stream.
        """
        data = await aside(_weight(message), partial(codec.encode, message))
        if isinstance(message, wire.Group) and wire.Parted in stream.messages and len(data) > self._parts.inline_bytes:
            data = codec.encode(await self._parts.put(message, data))
        if len(data) + HEADER_BYTES > self.link.max_payload:
            raise TooLarge(
                f"{type(message).__name__} is {len(data)} bytes, the broker's limit is {self.link.max_payload}"
            )
        headers = {MESSAGE_ID: message_id or f"{self.link.inbox}.{self.link.next_token()}"}
        if ticket:
            headers[wire.TICKET_HEADER] = str(ticket)
        if (eval_step := getattr(message, "eval_step", -1)) >= 0:
            headers[wire.EVAL_HEADER] = str(eval_step)
        if expected_last_seq is not None:
            headers[EXPECTED_LAST_SEQ] = str(expected_last_seq)
        async with self._in_flight:
            name, subject = stream.stream_name(self.run), stream.subject(self.run, key)
            essential = stream.essential or isinstance(message, wire.RulesChange)
            return await store(
                self.link, name, subject, data, headers, partial(release, self.link, self.run) if essential else None
            )

    async def last_seq(self, stream: Stream) -> int:
        """Sequence of the newest message ever stored, 0 when none."""
        return (await bounds(self.link, stream.stream_name(self.run)))[1]

    async def first_seq(self, stream: Stream) -> int:
        """Sequence of the oldest message kept; one past the newest when there is none."""
        return (await bounds(self.link, stream.stream_name(self.run)))[0]

    async def bounds(self, stream: Stream, *, known: int = 0) -> tuple[int, int]:
        """Return the oldest kept and the newest ever stored sequence, of one moment; (last + 1, last) when there is
        none.

        Args:
            known: a sequence that was stored; replicas that have not caught up with it are waited for, see
            ``api.bounds``.
        """
        return await bounds(self.link, stream.stream_name(self.run), known=known)

    async def missing(self, stream: Stream, seqs: Collection[int]) -> set[int]:
        """Return those of these sequences that were stored and are not kept any more."""
        if not seqs:
            return set()
        state = (await ask(self.link, f"STREAM.INFO.{stream.stream_name(self.run)}", {"deleted_details": True}))[
            "state"
        ]
        deleted, first, last = set(state.get("deleted") or ()), int(state["first_seq"]), int(state["last_seq"])
        return {seq for seq in seqs if seq <= last and (seq < first or seq in deleted or not state["messages"])}

    async def info(self, stream: Stream) -> dict[str, Any]:
        """JetStream's own description of a stream: its configuration and state."""
        return await ask(self.link, f"STREAM.INFO.{stream.stream_name(self.run)}")

    async def depth(self, stream: Stream) -> dict[str, int]:
        """For a work queue, messages per key not yet acknowledged; for a log, {'': messages kept}."""
        body = {"subjects_filter": stream.all_subjects(self.run)} if stream.kind is StreamKind.WORK_QUEUE else None
        state = (await ask(self.link, f"STREAM.INFO.{stream.stream_name(self.run)}", body))["state"]
        if stream.kind is not StreamKind.WORK_QUEUE:
            return {"": int(state["messages"])}
        return {subject.rpartition(".")[2]: int(count) for subject, count in (state.get("subjects") or {}).items()}

    async def trim(self, stream: Stream, before_seq: int) -> None:
        """Delete every message with a sequence below ``before_seq``."""
        if before_seq > 1:
            await ask(self.link, f"STREAM.PURGE.{stream.stream_name(self.run)}", {"seq": before_seq})

    async def delete(self, stream: Stream, seq: int) -> bool:
        """Delete one message by its sequence; False when it is not there (any more).

        A consumer that holds it already may still acknowledge it; nobody gets it again.
        """
        name = stream.stream_name(self.run)
        try:
            await ask(self.link, f"STREAM.MSG.DELETE.{name}", {"seq": seq, "no_erase": True})
        except ApiError as error:
            # Servers use several codes, a general one among them, for a message that is not there.
            if error.err_code not in DELETE_FAILED or await find(self.link, name, seq=seq) is not None:
                raise
            return False
        return True

    async def last_delivered(self, stream: Stream, key: str) -> int:
        """Return the highest sequence of a work queue's key that was ever delivered to anyone, 0 if none was."""
        name, consumer = stream.stream_name(self.run), key
        while True:
            try:
                info = await ask(self.link, f"CONSUMER.INFO.{name}.{consumer}")
            except ApiError as error:
                if error.err_code != NO_CONSUMER:
                    raise
                found = await find_consumer(self.link, name, key, stream.subject(self.run, key))
                if found is None or found["durable_name"] == consumer:
                    return 0
                consumer = found["durable_name"]  # another program made it
            else:
                return int(info["delivered"]["stream_seq"])

    async def trim_parts(self, log: Stream, keep: Callable[[int], bool]) -> int:
        """Delete the parts of all tickets of a log that are not to be kept; how many tickets had some.

        Args:
            log: SAMPLES or EVALS.
            keep: whether a record of this ticket may still be read, or come.
        """
        return await self._parts.trim(EVALUATION if log is EVALS else TRAINING, keep)

    # ------------------------------------------------------------------------------------------- read

    async def work_queue(self, stream: Stream, key: str) -> WorkQueue:
        """The queue of one key; the same object each time."""
        task = self._queues.get((stream.name, key))
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            task = self._queues[stream.name, key] = asyncio.create_task(self._open_queue(stream, key))
        return await asyncio.shield(task)

    async def _open_queue(self, stream: Stream, key: str) -> WorkQueue:
        queue = WorkQueue(self.link, self._marks, self._parts, stream, self.run, key)
        await queue.open()
        return queue

    async def read_log(
        self, stream: Stream, start_seq: int, *, wanted: Callable[[int], bool] = lambda _: True
    ) -> AsyncGenerator[LogRecord, None]:
        """Every record from ``start_seq`` on, in order, without gaps, across reconnects; waits at the end.

        A log with a size limit may have lost its oldest records; reading then starts at the oldest kept.

        Args:
            wanted: whether to fetch the group of this ticket where it travels in parts; asked when the record's turn
            comes. A record
                that is not wanted has the ``Parted`` as its message; one whose parts are gone or damaged has an error.

        Raises:
            LostState: the log ends before ``start_seq - 1``, or has lost records it should have kept.
        """
        name = stream.stream_name(self.run)
        following = max(start_seq, 1)

        async def start() -> dict[str, Any]:
            first, last = await bounds(self.link, name, known=following - 1)
            if last < following - 1:
                raise LostState(
                    f"{name} ends at {last}, but {following - 1} had been read from it; the broker lost its store"
                )
            if first > following and not stream.max_bytes:
                raise LostState(
                    f"{name} starts at {first}, but {following} is still to be read; it was trimmed too far"
                )
            return {"deliver_policy": "by_start_sequence", "opt_start_seq": following}

        async with aclosing(follow(self.link, name, start)) as entries:
            async for entry in entries:
                # A replica that came back from a crash or a partition may lack what the others have.
                skipped = range(following, entry.seq) if not stream.max_bytes else ()
                for seq in skipped:
                    log.warning("%s: %d did not come before %d; asking the stream's leader", name, seq, entry.seq)
                    if (missed := await find(self.link, name, seq=seq)) is not None:
                        following = seq + 1
                        yield await self.record(missed, stream, wanted)
                if entry.seq >= following:
                    following = entry.seq + 1
                    yield await self.record(entry, stream, wanted)

    async def record(
        self, entry: StoredEntry, stream: Stream, wanted: Callable[[int], bool] = lambda _: True
    ) -> LogRecord:
        """Decode one entry of a log, with its parts if they are wanted."""
        message, error = await decode_aside(entry.data, stream.messages)
        data: bytes | bytearray = entry.data
        if isinstance(message, wire.Parted) and wanted(message.ticket):
            message, error, body = await self._parts.load(message)
            data = body or data
        return LogRecord(entry.seq, message, error, ticket_of(entry.headers), data)

    async def watch_last(self, stream: Stream) -> AsyncGenerator[wire.Message, None]:
        """The newest value now and every newer one; intermediate values may be skipped."""
        newest = 0

        async def start() -> dict[str, Any]:
            return {"deliver_policy": "last_per_subject", "filter_subject": stream.all_subjects(self.run)}

        async with aclosing(follow(self.link, stream.stream_name(self.run), start)) as entries:
            async for entry in entries:
                if entry.seq == newest:
                    continue
                newest = entry.seq
                message, error = decode(entry.data, stream.messages)
                if message is None:
                    await self.dead_letter(stream, seq=entry.seq, ticket=0, reason=error, data=entry.data)
                else:
                    yield message

    async def key_value(self, stream: Stream) -> KeyValue:
        """The bucket of a KV row; shared by all runs, its keys begin with the run."""
        if stream.name in self._buckets:
            return self._buckets[stream.name]

        async def malformed(key: str, seq: int, reason: str, data: bytes) -> None:
            log.warning("%s %s: %s", stream.name, key, reason)
            if key == self.run or key.startswith(f"{self.run}."):
                await self.dead_letter(stream, seq=seq, ticket=0, reason=f"{key}: {reason}", data=data)

        config = self._config(stream, self.run or "any")
        assert config is not None, f"{stream.name} is not stored"
        ensure = partial(ensure_stream, self.link, config)
        if config["name"] not in self._made:
            await ensure()
        return self._buckets.setdefault(
            stream.name, KeyValue(self.link, stream, config["name"].removeprefix("KV_"), malformed, ensure)
        )

    async def dead_letter(self, stream: Stream, *, seq: int, ticket: int, reason: str, data: Buffer) -> None:
        """Put bytes nobody could use where the operator finds them; once, however many readers stumble over them."""
        letter = wire.DeadLetter(
            stream=stream.name,
            sequence=seq,
            ticket=ticket,
            reason=" ".join(reason.split()),
            by=self.name,
            data=bytes(data[:DEAD_BYTES]),
        )
        await self.publish(
            DEAD, letter, key=stream.name, ticket=ticket, message_id=f"dead.{stream.name}.{seq}" if seq else ""
        )


def _weight(message: wire.Message) -> int:
    """About how many bytes encoding takes through its hands; 0 for what is small, or not as it should be."""
    if not isinstance(message, wire.Group):
        return 0
    try:
        # an id, a logprob and a mask for each token
        return 9 * sum(len(one.loss_mask.data) for one in message.trajectories)
    except (TypeError, AttributeError):
        return 0  # encoding says what is wrong
