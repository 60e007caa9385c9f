"""Communicators made by hand, independent of the default process group, and the store that their members meet in.

Nothing here calls ``init_process_group``: the learner keeps its own default group. Every wait polls, so that it can be
left at any time; gloo's own timeout only ends the threads left behind. Facts that shaped this file, tried on torch
2.13: a gloo operation whose peer is stopped ends only at its timeout and ``abort`` does not wake it; with two
operations in flight the error of a dead peer may reach only one of them; a TCPStore client waits for a stopped server
without any timeout.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Final, Literal, Protocol
from weakref import WeakSet

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from broker.errors import TransferFailed

Backend = Literal["gloo", "nccl"]

IN_FLIGHT: Final = 3  # buckets on the wire at once
POLL_S: Final = 0.0005
SLICE_S: Final = 0.05
PEEK_EVERY_S: Final = 0.1
KEEP_S: Final = 3600.0  # store operations never end by the store's own timeout, which would write a page to stderr


WATCHES: Final[WeakSet[WaitMonitor]] = WeakSet()  # whatever is waiting, so that the end of the process can end it


class PeerLost(TransferFailed):
    """Something failed between this end and another one; which one is to blame cannot be seen from here."""


class BucketSequence(Protocol):
    """What is broadcast, in order; a list of tensors will do."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Tensor | None:
        """One bucket; None: not there yet, to be asked for again. Not asked for again once it was there."""
        ...


class WaitMonitor:
    """Lets another thread end a wait, and see that it makes progress."""

    def __init__(self) -> None:
        self.reason = ""
        self.beat_at = time.monotonic()
        self._peeked = 0.0
        WATCHES.add(self)

    def cancel(self, reason: str) -> None:
        """End the wait with TransferFailed."""
        self.reason = self.reason or reason

    def beat(self) -> None:
        """Called in every turn of a wait.

        Raises:
            TransferFailed: it was cancelled.
        """
        self.beat_at = time.monotonic()
        if self.reason:
            raise TransferFailed(self.reason)

    def due(self) -> bool:
        """Whether it is time to look at what costs more than a poll."""
        due = self.beat_at - self._peeked >= PEEK_EVERY_S
        if due:
            self._peeked = self.beat_at
        return due


def serve_store(host: str) -> tuple[TCPStore, int]:
    """The sender's store and its port. TCPStore by itself would listen on every interface; this one on ``host``
    only.
    """
    listener = socket.create_server((host, 0), backlog=256)
    port = int(listener.getsockname()[1])
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        timeout=timedelta(seconds=KEEP_S),
    )
    return store, port


def connect_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """A receiver's end.

    Raises:
        TransferFailed: nobody answers there.
    """
    if not reachable(host, port, timeout_s):
        raise TransferFailed(f"nobody answers at the rendezvous store {host}:{port}")
    try:
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise TransferFailed(f"no rendezvous store at {host}:{port}: {first_line(error)}") from None
    store.set_timeout(timedelta(seconds=KEEP_S))
    return store


def reachable(host: str, port: int, timeout_s: float) -> bool:
    """Whether the store's process is there; asked first, because torch writes a stack trace to stderr when it is
    not.
    """
    try:
        socket.create_connection((host, port), timeout_s).close()
    except OSError:
        return False
    return True


class WeightGroup:
    """One process group of the sender (rank 0) and its receivers.

    Raises:
        PeerLost: not everybody came within ``connect_timeout_s``.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        size: int,
        *,
        backend: Backend,
        host: str,
        timeout_s: float,
        connect_timeout_s: float,
    ) -> None:
        self.name, self.rank, self.size, self.timeout_s = name, rank, size, timeout_s
        self._polls = backend == "nccl"  # its wait with a timeout would abort the communicator
        make = _make_nccl if backend == "nccl" else _make_gloo
        try:
            self._group: Any = make(PrefixStore(f"{name}/group", store), rank, size, host, connect_timeout_s)
        except RuntimeError as error:
            raise PeerLost(f"communicator {name} of {size}: {first_line(error)}") from None

    def broadcast(
        self, buckets: BucketSequence, watch: WaitMonitor, *, done: Callable[[int], None], peek: Callable[[], None]
    ) -> None:
        """Send (rank 0) or receive the buckets, several at a time, each as soon as it is there.

        Args:
            done: called with a bucket's index when it is complete, while others are on the wire.
            peek: called now and then; raises TransferFailed to end it.

        Raises:
            PeerLost: a peer is gone, or a bucket was longer than ``timeout_s`` on the wire.
            TransferFailed: a bucket was not there within that time, or the watch was cancelled.
        """
        flying: list[tuple[int, Any]] = []
        following, progress_at = 0, time.monotonic()
        while following < len(buckets) or flying:
            while following < len(buckets) and len(flying) < IN_FLIGHT and (bucket := buckets[following]) is not None:
                flying.append((following, self._issue(bucket)))
                following += 1
            complete = [(index, work) for index, work in flying if work.is_completed()]
            watch.beat()
            if watch.due():
                peek()
            if not complete:
                if time.monotonic() - progress_at > self.timeout_s:
                    late, kind = (flying[0][0], PeerLost) if flying else (following, TransferFailed)
                    raise kind(f"bucket {late} of {len(buckets)} took longer than {self.timeout_s:g} s")
                self._rest(flying[0][1] if len(flying) == IN_FLIGHT or following == len(buckets) else None)
                continue
            progress_at = time.monotonic()
            for index, work in complete:
                _finish(work, index)
                flying.remove((index, work))
                done(index)

    def _issue(self, bucket: Tensor) -> Any:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = 0, 0, True
        options.timeout = timedelta(seconds=self.timeout_s * IN_FLIGHT)  # those before it on the wire count, too
        # gloo sends what lies on a device, too
        return self._group.broadcast([bucket if self._polls else bucket.cpu()], options)

    def _rest(self, work: Any | None) -> None:
        """A moment until ``work`` may be complete; not longer, for it may be another one that fails, or that is there
        by then.
        """
        if self._polls or work is None:
            time.sleep(POLL_S)
            return
        with suppress(RuntimeError):  # not done yet, or failed: the caller looks
            work.wait(timedelta(seconds=SLICE_S))

    def close(self) -> threading.Thread:
        """Let go of it; gloo's destructor waits for operations that may still hang, so it runs in a thread of its
        own.
        """
        group, self._group = [self._group], None
        group[0].abort()
        thread = threading.Thread(target=group.clear, name="weights-close", daemon=True)
        thread.start()
        return thread


def _finish(work: Any, index: int) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise PeerLost(f"bucket {index}: {first_line(error)}") from None


def _make_gloo(store: Store, rank: int, size: int, host: str, connect_timeout_s: float) -> Any:
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]  # else the host's name decides the interface
    options._timeout = timedelta(seconds=connect_timeout_s)
    options._threads = IN_FLIGHT
    return ProcessGroupGloo(store, rank, size, options)


def _make_nccl(store: Store, rank: int, size: int, host: str, connect_timeout_s: float) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=connect_timeout_s)
    with _environment("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"):  # else its watchdog ends this process when a peer hangs
        group = ProcessGroupNCCL(store, rank, size, options)
    group.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
    return group


@contextmanager
def _environment(key: str, value: str) -> Any:
    before = os.environ.get(key)
    os.environ[key] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[key]
        else:
            os.environ[key] = before


def first_line(error: BaseException) -> str:
    """The first line of what torch says, without the source file it was built from and without its advice."""
    first = str(error).partition("\n")[0].partition(" This is typically caused")[0]
    return first.partition("] ")[2] if first.startswith("[/") else first
