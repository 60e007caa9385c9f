"""Buckets that receivers fetch in parts, each at its own pace, and what each receiver still lacks."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from broker.weights.rendezvous.board_request import BoardRequest

PART_BYTES: Final = 1 << 20
MAX_REQUESTS: Final = 64  # of one receiver that are not answered yet
SLOWER: Final = 3.0  # a receiver may take this many times as long as the first that had everything


@dataclass
class _Receiver:
    since: float  # when it last got something, or nothing was left for it to get
    missing: dict[int, int] = field(default_factory=dict)  # bucket: bytes
    # token: bucket, start, size
    requests: dict[Hashable, tuple[int, int, int]] = field(default_factory=dict)
    finished: bool = False


class BucketShelf:
    """State of one broadcast; without clock. All times are seconds of one monotonic clock.

    Args:
        servers: that may fetch.
        num_buckets: of the broadcast.
        changed: held by callers of ``fetch`` and ``parts``; notified after each change. The other
            methods take it.

    Attributes:
        lost: servers that the broadcast goes on without, and why; the owner may add to it.
    """

    def __init__(
        self,
        servers: Sequence[str],
        num_buckets: int,
        changed: threading.Condition,
        now: float,
        lost: dict[str, str],
    ) -> None:
        self._receivers = {server: _Receiver(now) for server in servers}
        self._buckets: dict[int, Any] = {}  # that somebody still lacks
        self._num_buckets = num_buckets
        self._put = 0
        self._changed = changed
        self._begun = now
        self._first_s: float | None = None  # that the fastest receiver took
        self.lost = lost

    def put(self, bucket: Any, now: float) -> None:
        """Add the next bucket, as a view of its bytes that stays valid until the end of the
        broadcast.
        """
        with self._changed:
            index = self._put
            self._put = self._put + 1
            self._buckets[index] = bucket
            for server in self._live():
                receiver = self._receivers[server]
                receiver.since = receiver.since if receiver.missing else now
                receiver.missing[index] = len(bucket)

    def fetch(self, server: str, token: Hashable, request: BoardRequest) -> None:
        """Note a request for part of a bucket, available or not.

        Raises:
            ValueError: if the server takes no part, or asks for too much.
        """
        receiver = self._receivers.get(server)
        if receiver is None or server in self.lost:
            raise ValueError("not in this transfer any more")
        if not 0 <= request.number < self._num_buckets or not 0 < request.size <= PART_BYTES:
            raise ValueError(f"no such part: {request.size} bytes of bucket {request.number}")
        if len(receiver.requests) >= MAX_REQUESTS:
            raise ValueError(f"{MAX_REQUESTS} requests are not answered yet")
        receiver.requests[token] = (request.number, request.start, request.size)

    def parts(self, now: float) -> list[tuple[Hashable, bytes | None]]:
        """Return the requested parts that are available, None for those that never will be, and
        forget the requests.
        """
        parts: list[tuple[Hashable, bytes | None]] = []
        for server, receiver in self._receivers.items():
            for token, (index, start, size) in list(receiver.requests.items()):
                if index >= self._put and server not in self.lost:
                    continue
                del receiver.requests[token]
                bucket = self._buckets.get(index) if server not in self.lost else None
                if (
                    bucket is None
                    or start + size > len(bucket)
                    or receiver.missing.get(index, 0) < size
                ):
                    parts.append((token, None))
                    continue
                parts.append((token, bytes(bucket[start : start + size])))
                self._given(receiver, index, size, now)
        if parts:
            self._changed.notify_all()
        return parts

    def _given(self, receiver: _Receiver, index: int, size: int, now: float) -> None:
        receiver.since = now
        receiver.missing[index] -= size
        if not receiver.missing[index]:
            del receiver.missing[index]
        if not receiver.missing and self._put == self._num_buckets:
            receiver.finished = True
            self._first_s = now - self._begun if self._first_s is None else self._first_s

    def complete(self) -> list[int]:
        """Return the buckets that all have now, once each."""
        with self._changed:
            live = [self._receivers[server] for server in self._live()]
            complete = [
                index
                for index in self._buckets
                if not any(index in receiver.missing for receiver in live)
            ]
            for index in complete:
                del self._buckets[index]
            return complete

    def drop(self, server: str, reason: str) -> None:
        """Go on without a server."""
        with self._changed:
            if server in self._receivers and server not in self.lost:
                self.lost[server] = reason
                self._changed.notify_all()

    def drop_late(self, now: float, timeout_s: float) -> None:
        """Go on without the servers that fetched nothing for so long, or are much slower than
        another one.
        """
        with self._changed:
            for server in self._live():
                receiver = self._receivers[server]
                if not receiver.missing:
                    continue
                if now - receiver.since > timeout_s:
                    self.lost[server] = (
                        f"bucket {min(receiver.missing)} of {self._num_buckets} took longer than {timeout_s:g} s"
                    )
                elif self._first_s is not None and now - self._begun > max(
                    timeout_s, SLOWER * self._first_s
                ):
                    self.lost[server] = (
                        f"took {now - self._begun:.1f} s, another server {self._first_s:.1f} s"
                    )

    def live(self) -> list[str]:
        """Return the servers that are not lost."""
        with self._changed:
            return self._live()

    def finished(self) -> bool:
        """Return whether all that are not lost have everything."""
        with self._changed:
            return all(self._receivers[server].finished for server in self._live())

    def _live(self) -> list[str]:
        return [server for server in self._receivers if server not in self.lost]
