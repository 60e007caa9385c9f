"""Reads one version from shared memory while the sender is still packing it; ends if it is
overwritten.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from broker.errors import TransferFailed
from broker.weights.digest import BucketDigest
from broker.weights.group import POLL_S, WaitMonitor
from broker.weights.memory.staging import Words


class MemoryRead:
    """Transfer of one version from the learner's memory to this process's.

    Args:
        copy: copies bytes of its second argument to its first, and returns when they are there.
        piece: bytes per copy.
    """

    def __init__(
        self,
        words: Words,
        version: int,
        watch: WaitMonitor,
        timeout_s: float,
        peek: Callable[[], None],
        copy: Callable[[Any, Any], None],
        piece: int,
    ) -> None:
        self._words = words
        self._version = version
        self._watch = watch
        self._timeout_s = timeout_s
        self._peek = peek
        self._copy = copy
        self._piece = piece

    def bucket(self, source: Any, target: Any, start: int, bucket: Tensor) -> bytes:
        """Copy a bucket; return the digest of the copy."""
        digest = BucketDigest(bucket)
        position = 0
        while position < len(source):
            stop = min(position + self._piece, len(source))
            self._packed(start + stop)
            self._copy(target[position:stop], source[position:stop])
            self._same()
            digest.add(stop)
            position = stop
        return digest.finish()

    def _packed(self, offset: int) -> None:
        """Wait until all bytes below are packed."""
        progress_at = time.monotonic()
        last_packed = -1
        while True:
            self._watch.beat()
            if self._watch.due():
                self._peek()
            packed = int(self._words[1])
            self._same()  # the number could be another version's
            if packed >= offset:
                return
            if packed != last_packed:
                progress_at = time.monotonic()
                last_packed = packed
            if time.monotonic() - progress_at > self._timeout_s:
                problem = (
                    f"was packed up to byte {packed}, then nothing came for {self._timeout_s:g} s"
                )
                raise TransferFailed(f"version {self._version} {problem}")
            time.sleep(POLL_S)

    def _same(self) -> None:
        if self._words[0] != self._version + 1:
            raise TransferFailed(f"version {self._version} was overwritten while it was read")
