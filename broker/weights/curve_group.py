"""Carries buckets over ZeroMQ CURVE, encrypted and authenticated: each receiver fetches them at its
own pace.

Everything goes through the rendezvous' port. A receiver asks for parts of a bucket before it needs
them, as many as fill a long link; the sender answers as soon as the bucket is packed. What is asked
for bounds what waits in memory. A receiver that is dead, expelled or slow is left behind, the
others finish.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import zmq
from torch import Tensor

from broker.errors import TransferFailed
from broker.weights.bucket_shelf import PART_BYTES, BucketShelf
from broker.weights.group import POLL_S, BucketSequence, PeerLost, WaitMonitor
from broker.weights.rendezvous.board_client import BoardClient
from broker.weights.rendezvous.board_request import BoardRequest
from broker.weights.rendezvous.board_server import NO, YES, BoardServer

WINDOW: Final = 16  # parts asked for at a time: 16 MiB fill a link of 1 Gbit/s and 130 ms
POLL_MS: Final = 50


class _ClockedShelf:
    """A shelf with a clock, for the rendezvous."""

    def __init__(self, shelf: BucketShelf) -> None:
        self.fetch = shelf.fetch
        self._shelf = shelf

    def parts(self) -> list[tuple[Any, bytes | None]]:
        return self._shelf.parts(time.monotonic())


class CurveSender:
    """The sender's end.

    Args:
        server: the rendezvous.
        members: servers that receive, by their names there.
        timeout_s: longest time in which a receiver may fetch nothing.

    Attributes:
        lost: receivers that the last broadcast went on without, and why.
    """

    def __init__(
        self, server: BoardServer, name: str, members: Sequence[str], timeout_s: float
    ) -> None:
        self.name, self.lost = name, dict[str, str]()
        self._server = server
        self._members = tuple(members)
        self._timeout_s = timeout_s
        self._uses = 0
        self._shelf: BucketShelf | None = None

    def open(self, num_buckets: int, lost: dict[str, str]) -> None:
        """Take requests for the next broadcast.

        Args:
            lost: receivers to go on without, and why; may grow at any time, here and elsewhere.
        """
        self.lost = lost
        self._shelf = BucketShelf(
            self._members, num_buckets, self._server.changed, time.monotonic(), lost
        )
        self._server.share(f"{self.name}/{self._uses}", _ClockedShelf(self._shelf))

    def broadcast(
        self,
        buckets: BucketSequence,
        watch: WaitMonitor,
        *,
        done: Callable[[int], None],
        peek: Callable[[], None],
    ) -> None:
        """Let the receivers fetch the buckets, each as soon as it is available; ``open`` comes
        first.

        Args:
            done: called with a bucket's index once all receivers have it.
            peek: called now and then.

        Raises:
            PeerLost: if all receivers are lost.
            TransferFailed: if a bucket was not available within ``timeout_s``, or the wait was
                cancelled.
        """
        shelf = self._shelf
        self._shelf = None
        assert shelf is not None, "open the broadcast first"
        try:
            self._run(shelf, buckets, watch, done, peek)
        finally:
            self._server.withdraw(f"{self.name}/{self._uses}")
            self._uses += 1

    def _run(
        self,
        shelf: BucketShelf,
        buckets: BucketSequence,
        watch: WaitMonitor,
        done: Callable[[int], None],
        peek: Callable[[], None],
    ) -> None:
        following = 0
        packed_at = time.monotonic()
        while not (following == len(buckets) and shelf.finished()):
            watch.beat()
            while following < len(buckets) and (bucket := buckets[following]) is not None:
                shelf.put(_bytes_of(bucket), time.monotonic())
                following = following + 1
                packed_at = time.monotonic()
                self._server.poke()
            for index in shelf.complete():
                done(index)
            if watch.due():
                peek()
                admitted = self._server.admitted()
                for server in [server for server in shelf.live() if server not in admitted]:
                    shelf.drop(server, "went away")
                shelf.drop_late(time.monotonic(), self._timeout_s)
            if not shelf.live():
                raise PeerLost(
                    "; ".join(f"{server}: {reason}" for server, reason in shelf.lost.items())
                )
            if following < len(buckets):
                if time.monotonic() - packed_at > self._timeout_s and not any(shelf.lost):
                    raise TransferFailed(
                        f"bucket {following} of {len(buckets)} took longer than {self._timeout_s:g} s"
                    )
                time.sleep(POLL_S)
            else:
                with self._server.changed:
                    self._server.changed.wait(POLL_MS / 1000)
        for index in shelf.complete():
            done(index)

    def close(self) -> threading.Thread:
        """Take no more requests."""
        thread = threading.Thread(
            target=self._server.withdraw,
            args=(f"{self.name}/{self._uses}",),
            name="weights-close",
            daemon=True,
        )
        thread.start()
        return thread


class CurveReceiver:
    """A receiver's end, with a connection of its own."""

    def __init__(self, client: BoardClient, name: str, timeout_s: float) -> None:
        self.name, self.lost = name, dict[str, str]()
        self._socket = client.connect()
        self._timeout_s = timeout_s
        self._uses = 0
        self._serial = 0
        self._lock = threading.Lock()

    def broadcast(
        self,
        buckets: BucketSequence,
        watch: WaitMonitor,
        *,
        done: Callable[[int], None],
        peek: Callable[[], None],
    ) -> None:
        """Fetch the buckets, several parts at a time.

        Raises:
            PeerLost: if the sender goes on without this receiver, or nothing came for
                ``timeout_s``.
            TransferFailed: if a bucket was not available within that time, or the wait was
                cancelled.
        """
        with self._lock:
            name = f"{self.name}/{self._uses}"
            self._uses = self._uses + 1
            fetching = _Fetching(self._ask, name, buckets)
            progress_at = time.monotonic()
            while not fetching.finished:
                fetching.ask()
                watch.beat()
                if watch.due():
                    peek()
                if self._socket.poll(POLL_MS if fetching.asked else 1):
                    complete = fetching.take(*self._socket.recv_multipart(copy=False))
                    progress_at = time.monotonic()
                    if complete is not None:
                        done(complete)
                elif time.monotonic() - progress_at > self._timeout_s:
                    kind = PeerLost if fetching.asked else TransferFailed
                    at = f"bucket {fetching.at} of {len(buckets)}"
                    raise kind(f"{at} took longer than {self._timeout_s:g} s")

    def _ask(self, request: BoardRequest) -> bytes:
        self._serial += 1
        request_id = self._serial.to_bytes(8)
        self._socket.send_multipart([request_id, msgspec.msgpack.encode(request)], zmq.NOBLOCK)
        return request_id

    def close(self) -> threading.Thread:
        """Disconnect, in a thread: a broadcast may still run in another one."""

        def end() -> None:
            with self._lock:
                self._socket.close()

        thread = threading.Thread(target=end, name="weights-close", daemon=True)
        thread.start()
        return thread


class _Fetching:
    """The parts of one broadcast: which are asked for, and which are there."""

    def __init__(
        self, ask: Callable[[BoardRequest], bytes], name: str, buckets: BucketSequence
    ) -> None:
        self._ask = ask
        self._name = name
        self._buckets = buckets
        self.asked: dict[bytes, tuple[int, int, int]] = {}  # request: bucket, start, size
        self._views: dict[int, Any] = {}
        self._left: dict[int, int] = {}  # bytes of buckets that are not complete
        self._todo: deque[tuple[int, int, int]] = deque()
        self._following = 0

    @property
    def finished(self) -> bool:
        """Whether all buckets are complete."""
        return self._following == len(self._buckets) and not self._left

    @property
    def at(self) -> int:
        """The first bucket that is not complete."""
        return min(self._left, default=self._following)

    def ask(self) -> None:
        """Ask for as many parts as the window allows."""
        while len(self.asked) < WINDOW:
            if not self._todo and not self._next_bucket():
                return
            index, start, size = part = self._todo.popleft()
            request = BoardRequest("fetch", [self._name], number=index, start=start, size=size)
            self.asked[self._ask(request)] = part

    def _next_bucket(self) -> bool:
        index = self._following
        if index == len(self._buckets) or (bucket := self._buckets[index]) is None:
            return False
        view = self._views[index] = _bytes_of(bucket)
        self._left[index] = len(view)
        self._following = index + 1
        self._todo.extend(
            (index, at, min(PART_BYTES, len(view) - at)) for at in range(0, len(view), PART_BYTES)
        )
        return True

    def take(self, *frames: zmq.Frame) -> int | None:
        """Store a part; return its bucket if that is complete now.

        Raises:
            PeerLost: if the sender refused it.
        """
        part = self.asked.pop(frames[0].bytes, None) if len(frames) >= 2 else None
        if part is None:
            return None  # of an earlier broadcast
        index, start, size = part
        if frames[1].bytes != YES or len(frames) != 3 or len(frames[2].buffer) != size:
            reason = (
                "left this server behind"
                if frames[1].bytes == NO
                else bytes(frames[-1].buffer)[:200].decode(errors="replace")
            )
            raise PeerLost(f"bucket {index}: the learner refused a part: {reason}")
        self._views[index][start : start + size] = frames[2].buffer
        self._left[index] -= size
        if self._left[index]:
            return None
        del self._left[index], self._views[index]
        return index


def _bytes_of(bucket: Tensor) -> Any:
    return bucket.cpu().numpy().data
