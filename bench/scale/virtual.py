"""An event loop whose clock jumps to the next timer, and a broker in memory: weeks pass in seconds."""

from __future__ import annotations

import asyncio
import selectors
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

from broker.contract import wire
from broker.contract.streams import EPISODES, Stream
from broker.jetstream.bus import LogRecord

T = TypeVar("T")


class _Selector(selectors.SelectSelector):
    """Lets the loop's clock run ahead instead of waiting for it."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select()  # nothing but another thread can go on
        ready = super().select(0)
        if not ready:
            self.loop.now += max(timeout, 0.0)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """``time()`` is virtual; a sleep takes no real time.

    What is meant for a thread runs at once: the clock would not wait for it, so that no run would
    be like another.
    """

    def __init__(self) -> None:
        self.now = 0.0
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now

    def run_in_executor(  # type: ignore[override]  # as asyncio declares it, with a type for each argument
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - for the awaiting caller
            done.set_exception(error)
        return done


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a private event loop."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


class MemoryBus:
    """What the learner's parts use of ``broker.jetstream.bus.Bus``, without a broker."""

    def __init__(self, run: str, name: str) -> None:
        self.run = run
        self.name = name
        self._last: dict[str, int] = {}
        self._logs: dict[str, list[LogRecord]] = {}
        self._queues: dict[tuple[str, str], deque[wire.Message]] = {}
        self._delivered: dict[tuple[str, str], int] = {}
        self._deleted: dict[str, set[int]] = {}
        self._grown = asyncio.Event()

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
    ) -> int | None:
        last = self._last.get(stream.name, 0)
        if expected_last_seq is not None and expected_last_seq != last:
            return None
        seq = self._last[stream.name] = last + 1
        if stream.key:
            self._queues.setdefault((stream.name, key), deque()).append(message)
        else:
            self._logs.setdefault(stream.name, []).append(LogRecord(seq, message, "", ticket, b""))
        grown = self._grown
        self._grown = asyncio.Event()
        grown.set()
        return seq

    async def last_seq(self, stream: Stream) -> int:
        return self._last.get(stream.name, 0)

    async def last_delivered(self, stream: Stream, key: str) -> int:
        return self._delivered.get((stream.name, key), 0)

    async def delete(self, stream: Stream, seq: int) -> bool:
        self._deleted.setdefault(stream.name, set()).add(seq)
        return True

    async def remove_groups(self, number: int, *, evaluation: bool = False) -> None:
        for (name, key), queue in self._queues.items():
            if name == EPISODES.name:
                groups = (one for one in queue if isinstance(one, wire.Group))
                kept = (
                    one
                    for one in groups
                    if (one.ticket, one.eval_step >= 0) != (number, evaluation)
                )
                self._queues[name, key] = deque(kept)

    async def missing(self, stream: Stream, seqs: Collection[int]) -> set[int]:
        return self._deleted.get(stream.name, set()).intersection(seqs)

    async def trim_parts(self, log: Stream, keep: Callable[[int], bool]) -> int:
        return 0

    async def trim(self, stream: Stream, before_seq: int) -> None:
        self._deleted.setdefault(stream.name, set()).update(range(1, before_seq))

    async def dead_letter(
        self, stream: Stream, *, seq: int, ticket: int, reason: str, data: bytes
    ) -> None:
        raise AssertionError(f"{stream.name} {seq}: {reason}")

    async def read_log(
        self, stream: Stream, start_seq: int, **_: Any
    ) -> AsyncGenerator[LogRecord, None]:
        following = start_seq
        while True:
            grown = self._grown
            log = self._logs.get(stream.name, [])
            while following <= len(log):
                following += 1
                yield log[following - 2]
            await grown.wait()

    def take(self, stream: Stream, key: str) -> wire.Message | None:
        """Remove and return the next message of a work queue, or None."""
        queue = self._queues.get((stream.name, key), deque())
        while queue:
            message = queue.popleft()
            if isinstance(message, wire.Group):
                return message
            assert isinstance(message, wire.Ticket | wire.EvalTicket)
            if message.number not in self._deleted.get(stream.name, ()):
                known = self._delivered.get((stream.name, key), 0)
                self._delivered[stream.name, key] = max(known, message.number)
                return message
        return None

    def queued(self, stream: Stream, key: str) -> list[wire.Group]:
        """Return the groups in a work queue."""
        return [
            message
            for message in self._queues.get((stream.name, key), ())
            if isinstance(message, wire.Group)
        ]

    def give_back(self, stream: Stream, key: str, message: wire.Message) -> None:
        """Put a message back at the head of its work queue."""
        self._queues.setdefault((stream.name, key), deque()).appendleft(message)
