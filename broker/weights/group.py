"""Communicators of torch's process groups, independent of the default one.

Nothing here calls ``init_process_group``: the learner keeps its own default group. Every wait
polls, so that it can be cancelled at any time; gloo's own timeout only ends threads left behind.
Facts about torch 2.13 behind this design: a gloo operation whose peer is stopped ends only at its
timeout, and ``abort`` does not wake it; with two operations in flight the error of a dead peer may
reach only one of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable
from weakref import WeakSet

from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, Store  # type: ignore[attr-defined]

from broker.errors import TransferFailed

if TYPE_CHECKING:
    from broker.weights.carriers.base import CollectiveCarrier
    from broker.weights.protocol.session import TransferSettings

IN_FLIGHT: Final = 3  # buckets on the wire at a time
POLL_S: Final = 0.0005
SLICE_S: Final = 0.05
PEEK_EVERY_S: Final = 0.1

# all waits, so that the end of the process can cancel them
WATCHES: Final[WeakSet[WaitMonitor]] = WeakSet()


class PeerLost(TransferFailed):
    """The connection to a peer failed; which side is to blame is unknown here."""


class BucketSequence(Protocol):
    """What is broadcast, in order, for example a list of tensors."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Tensor | None:
        """Return a bucket; None: not available yet, ask again. It is not read again after that."""
        ...


class WaitMonitor:
    """Lets another thread cancel a wait and see its progress."""

    def __init__(self) -> None:
        self.reason = ""
        self.beat_at = time.monotonic()
        self._peeked = 0.0
        WATCHES.add(self)

    def cancel(self, reason: str) -> None:
        """End the wait with TransferFailed."""
        self.reason = self.reason or reason

    def beat(self) -> None:
        """Note progress; called in each turn of a wait.

        Raises:
            TransferFailed: if the wait was cancelled.
        """
        self.beat_at = time.monotonic()
        if self.reason:
            raise TransferFailed(self.reason)

    def due(self) -> bool:
        """Return whether it is time for a check that costs more than a poll."""
        is_due = self.beat_at - self._peeked >= PEEK_EVERY_S
        if is_due:
            self._peeked = self.beat_at
        return is_due


class Group(Protocol):
    """What carries the buckets of several transfers from the sender (rank 0) to the same receivers.

    Attributes:
        name: of the communicator, in session ids.
        lost: receivers that a broadcast went on without, and why; empty if one failure ends it for
            all.
    """

    name: str
    lost: dict[str, str]

    def broadcast(
        self,
        buckets: BucketSequence,
        watch: WaitMonitor,
        *,
        done: Callable[[int], None],
        peek: Callable[[], None],
    ) -> None:
        """Send or receive the buckets, see ``WeightGroup.broadcast``."""
        ...

    def close(self) -> threading.Thread:
        """Release it in a thread, and return that thread."""
        ...


@runtime_checkable
class IndependentGroup(Group, Protocol):
    """A sender's end whose receivers do not need each other."""

    def open(self, num_buckets: int, lost: dict[str, str]) -> None:
        """Prepare the next broadcast.

        Args:
            lost: receivers to go on without, and why; may grow at any time.
        """
        ...


class WeightGroup:
    """A process group of the sender (rank 0) and its receivers.

    Raises:
        PeerLost: if not all members connect in time.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        size: int,
        *,
        carrier: CollectiveCarrier,
        settings: TransferSettings,
    ) -> None:
        self.name = name
        self.timeout_s = settings.timeout_s
        self.lost: dict[str, str] = {}
        self._store = store  # written in Python, so torch does not keep it alive
        self._polls = carrier.polls
        self._device = carrier.device()
        try:
            self._group: Any = carrier.connect(
                PrefixStore(f"{name}/group", store), rank, size, settings
            )
        except RuntimeError as error:
            raise PeerLost(f"communicator {name} of {size}: {first_line(error)}") from None

    def broadcast(
        self,
        buckets: BucketSequence,
        watch: WaitMonitor,
        *,
        done: Callable[[int], None],
        peek: Callable[[], None],
    ) -> None:
        """Send (rank 0) or receive the buckets, several at a time, each as soon as it is available.

        Args:
            done: called with a bucket's index when it is complete, while others are on the wire.
            peek: called now and then; raises TransferFailed to end the broadcast.

        Raises:
            PeerLost: if a peer is gone, or a bucket was on the wire for longer than ``timeout_s``.
            TransferFailed: if a bucket was not available within that time, or the wait was
                cancelled.
        """
        flying: list[tuple[int, Any, Tensor]] = []
        following = 0
        progress_at = time.monotonic()
        while following < len(buckets) or flying:
            while (
                following < len(buckets)
                and len(flying) < IN_FLIGHT
                and (bucket := buckets[following]) is not None
            ):
                # where it is staged may be another device than the group's
                local_bucket = bucket.to(self._device)
                flying.append((following, self._issue(local_bucket), local_bucket))
                following += 1
            complete = [broadcast for broadcast in flying if broadcast[1].is_completed()]
            watch.beat()
            if watch.due():
                peek()
            if not complete:
                if time.monotonic() - progress_at > self.timeout_s:
                    late, kind = (flying[0][0], PeerLost) if flying else (following, TransferFailed)
                    raise kind(
                        f"bucket {late} of {len(buckets)} took longer than {self.timeout_s:g} s"
                    )
                self._rest(
                    flying[0][1] if len(flying) == IN_FLIGHT or following == len(buckets) else None
                )
                continue
            progress_at = time.monotonic()
            for broadcast in complete:
                index, work, _ = broadcast
                _finish(work, index)
                flying.remove(broadcast)
                done(index)

    def _issue(self, bucket: Tensor) -> Any:
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.asyncOp = True
        # includes those before it on the wire
        options.timeout = timedelta(seconds=self.timeout_s * IN_FLIGHT)
        return self._group.broadcast([bucket], options)

    def _rest(self, work: Any | None) -> None:
        """Sleep until ``work`` may be complete, but only briefly: another one may fail or complete
        first.
        """
        if self._polls or work is None:
            time.sleep(POLL_S)
            return
        with suppress(RuntimeError):  # unfinished or failed: the caller checks
            work.wait(timedelta(seconds=SLICE_S))

    def close(self) -> threading.Thread:
        """Release the group in a thread: gloo's destructor waits for operations that may hang."""
        group = [self._group, self._store]
        self._group = None
        group[0].abort()
        thread = threading.Thread(target=group.clear, name="weights-close", daemon=True)
        thread.start()
        return thread


def _finish(work: Any, index: int) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise PeerLost(f"bucket {index}: {first_line(error)}") from None


def first_line(error: BaseException) -> str:
    """Return the first line of a torch error, without the source file and the advice."""
    first = str(error).partition("\n")[0].partition(" This is typically caused")[0]
    return first.partition("] ")[2] if first.startswith("[/") else first
