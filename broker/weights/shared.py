"""Weights for servers of the learner's own host: they read the staging buffers where they lie, and no byte goes through a socket.

    learner                                                     server of the same host and user
    Segment: a memfd of one page of words and the two           offer.segment says where: process, file, name
    staging buffers; mapped here once, sealed                   Window: opened by /proc/PID/fd, mapped to read alone;
                                                                where that fails the join says so, and gloo carries the bytes
    words of a side: version + 1, bytes packed so far   --->    waits for bytes, copies them into its own receiving buffer
    copy of the tensors, in pieces of 2 MiB             --->    piece by piece, each digested while it is in the caches
                                                                after each piece: is it still this version? At the end: is the
                                                                digest of its own copy the learner's? Else nothing is loaded.

What lies in the receiving buffer afterwards, and all that follows (digest, probe, double buffers), is as after a broadcast; ready, go,
done and stop are said through the store (broker.weights.transfer). The side that is being sent is not written while its receivers are
waited for. One that was given up may read on while it is overwritten: it sees the other version in the words, or, should memory
order ever hide that, another digest of its copy.

Why a memfd: it has no name in any file system, so the kernel frees it with the last process that has it, whoever is killed and when; it is
not bound by the size of /dev/shm (64 MiB in many containers); and ``/proc/PID/fd`` lets nobody in but the same user (and root) who sees
the same processes, which is just who can be on the same host. It cannot be cut short under a reader (F_SEAL_SHRINK), and nobody but the
learner can write it (F_SEAL_FUTURE_WRITE, Linux 5.1). A server lets go of it as soon as the learner's process has ended.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import mmap
import os
import re
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

from broker.errors import TransferFailed
from broker.weights.digest import BucketDigest
from broker.weights.group import POLL_S, Watch
from broker.weights.plan import Plan
from broker.weights.staging import PIECE_BYTES, Flat, Words

log = logging.getLogger(__name__)

SIDES: Final = 2
PAGE_BYTES: Final = 4096
WORDS_OF_A_SIDE: Final = 8  # a cache line
F_SEAL_FUTURE_WRITE: Final = 0x10  # <linux/fcntl.h>; the module fcntl has no name for it
ADDRESS: Final = re.compile(r"([1-9]\d{0,9})/(\d{1,9})/(rlearner-weights-[0-9a-f]{16})")


class Segment:
    """The sender's: memory for its two staging buffers that others on this host can read.

    Attributes:
        address: where, for ``Window``: process id, file descriptor, name.

    Raises:
        OSError: there is no such memory here.
    """

    def __init__(self, plan: Plan) -> None:
        name = f"rlearner-weights-{secrets.token_hex(8)}"
        file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        finalize(self, os.close, file)
        os.ftruncate(file, size_of(plan))
        self._memory = mmap.mmap(file, size_of(plan))
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
        self.address = f"{os.getpid()}/{file}/{name}"
        self._plan = plan

    def buffer(self, side: int) -> Tensor:
        """uint8, shape (plan.size_bytes,), zero."""
        return torch.from_numpy(np.frombuffer(self._memory, np.uint8, self._plan.size_bytes, _offset(self._plan, side)))

    def words(self, side: int) -> Words:
        """int64: [version + 1 or 0 for none, bytes packed]."""
        return _words(self._memory, side)


class Window:
    """A receiver's: a segment as it is seen from another process, to read alone.

    Raises:
        OSError, ValueError: it cannot be opened from here, or is another one.
    """

    def __init__(self, address: str, plan: Plan) -> None:
        found = ADDRESS.fullmatch(address)
        if found is None:
            raise ValueError("it is no address of a segment")
        pid, path, name = int(found[1]), f"/proc/{found[1]}/fd/{found[2]}", f"/memfd:{found[3]} (deleted)"
        self.address = address
        self.process = os.pidfd_open(pid)  # readable once it has ended
        finalize(self, os.close, self.process)
        if os.readlink(path) != name:
            raise ValueError("another process has that number here")
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(file).st_size
            if os.readlink(f"/proc/self/fd/{file}") != name or size != size_of(plan):
                raise ValueError(f"what lies there is another one, of {size} bytes")
            self._memory: mmap.mmap | None = mmap.mmap(file, size, prot=mmap.PROT_READ)
        finally:
            os.close(file)
        self._plan = plan

    def take(
        self, version: int, flat: Flat, watch: Watch, *, timeout_s: float, done: Callable[[int], None], peek: Callable[[], None]
    ) -> list[bytes]:
        """Copy a version into a buffer of its plan as it is packed; digests of its buckets, taken of the copy.

        Args:
            timeout_s: longest wait for more bytes.
            done: called with a bucket's index when it is complete.
            peek: called now and then; raises TransferFailed to end it.

        Raises:
            TransferFailed: it does not lie there any more, no more bytes came, or the watch was cancelled. What lies in ``flat`` is
                worth nothing then.
        """
        try:
            return self._take(version, flat, watch, timeout_s, done, peek)
        except TransferFailed as error:
            reason = str(error)
        raise TransferFailed(reason)  # not the same: its frames would keep the memory for as long as anybody keeps the error

    def _take(
        self, version: int, flat: Flat, watch: Watch, timeout_s: float, done: Callable[[int], None], peek: Callable[[], None]
    ) -> list[bytes]:
        memory = self._memory
        sides = [side for side in range(SIDES) if memory is not None and _words(memory, side)[0] == version + 1]
        if memory is None or not sides:
            raise TransferFailed(f"version {version} does not lie in the learner's memory any more")
        reading = _Reading(_words(memory, sides[0]), version, watch, timeout_s, peek)
        source = np.frombuffer(memory, np.uint8, self._plan.size_bytes, _offset(self._plan, sides[0]))
        target = flat.buffer.numpy()
        digests = []
        for index, (start, stop) in enumerate(self._plan.buckets):
            digests.append(reading.bucket(source[start:stop], target[start:stop], start, flat.bucket(index)))
            done(index)
        return digests

    def close(self) -> None:
        """Let go of the memory; whoever still reads holds it for as long as that takes."""
        self._memory = None


class _Reading:
    """One version on its way from the learner's memory into this process's."""

    def __init__(self, words: Words, version: int, watch: Watch, timeout_s: float, peek: Callable[[], None]) -> None:
        self._words, self._version, self._watch, self._timeout_s, self._peek = words, version, watch, timeout_s, peek

    def bucket(self, source: Any, target: Any, start: int, bucket: Tensor) -> bytes:
        """Copy one; the digest of the copy."""
        digest, done = BucketDigest(bucket), 0
        while done < len(source):
            stop = min(done + PIECE_BYTES, len(source))
            self._packed(start + stop)
            np.copyto(target[done:stop], source[done:stop])
            self._same()
            digest.add(stop)
            done = stop
        return digest.finish()

    def _packed(self, offset: int) -> None:
        """Wait until all bytes below are in place."""
        progress_at, before = time.monotonic(), -1
        while True:
            self._watch.beat()
            if self._watch.due():
                self._peek()
            packed = int(self._words[1])
            self._same()  # else the number was another version's
            if packed >= offset:
                return
            if packed != before:
                progress_at, before = time.monotonic(), packed
            if time.monotonic() - progress_at > self._timeout_s:
                raise TransferFailed(f"version {self._version} was packed up to byte {packed}, then nothing came for {self._timeout_s:g} s")
            time.sleep(POLL_S)

    def _same(self) -> None:
        if self._words[0] != self._version + 1:
            raise TransferFailed(f"version {self._version} was overwritten while it was read")


class Neighbour:
    """What a receiver keeps of the learner of its host: the window, until that process ends or another is looked for."""

    def __init__(self) -> None:
        self.window: Window | None = None
        self.problem = ""  # why the address looked for last cannot be read from here
        self._tried = ""

    def reach(self, address: str, plan: Plan) -> Window | None:
        """The window on a segment, None where it cannot be opened from here. Call it in the event loop."""
        if self.window is not None and self.window.address != address:
            self.leave()
        if self.window is None and address and address != self._tried:
            self._tried, self.problem = address, ""
            try:
                self.window = Window(address, plan)
            except (OSError, ValueError) as error:
                self.problem = error.strerror or type(error).__name__ if isinstance(error, OSError) else str(error)
            else:
                asyncio.get_running_loop().add_reader(self.window.process, self.leave)
        return self.window

    def leave(self) -> None:
        """Let go of it."""
        if self.window is not None:
            self.window.close()
            with suppress(RuntimeError):  # no loop any more
                asyncio.get_running_loop().remove_reader(self.window.process)
            self.window, self._tried = None, ""


def segment_of(plan: Plan) -> Segment | None:
    """Memory that servers of this host can read; None where there is none of that kind."""
    try:
        return Segment(plan)
    except OSError as error:
        log.warning("weights: servers of this host get them by gloo, for there is no memory to share here: %s", error)
        return None


def size_of(plan: Plan) -> int:
    """Bytes of a segment for versions of this plan."""
    return _offset(plan, SIDES)


def _offset(plan: Plan, side: int) -> int:
    return PAGE_BYTES + side * -(-plan.size_bytes // PAGE_BYTES) * PAGE_BYTES


def _words(memory: mmap.mmap, side: int) -> Words:
    return np.frombuffer(memory, np.int64, 2, side * WORDS_OF_A_SIDE * 8)
