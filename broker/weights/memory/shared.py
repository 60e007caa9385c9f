"""Weights for servers of the learner's host: they read the staging buffers, and no byte goes
through a socket.

    learner                                                     server of the same host and user
    Segment: a memfd of one page of words and the two           offer.segment says where: process, file, name
    staging buffers; mapped here once, sealed                   Window: opened by /proc/PID/fd, mapped to read alone;
                                                                where that fails the join says so, and gloo carries the
                                                                bytes
    words of a side: version + 1, bytes packed so far   --->    waits for bytes, copies them into its own buffer
    copy of the tensors, in pieces of 2 MiB             --->    piece by piece, each digested while in the caches
                                                                after each piece: is it still this version? At the end:
                                                                is the digest of its own copy the learner's? Else
                                                                nothing is loaded.

The two buffers may lie on a device instead, so that servers of the same GPU or a peer of it copy
from there (CUDA IPC): the memfd is then only the page of words, followed by the card with which
others open the device memory (broker.weights.memory.devices). All else is the same; bytes count as
packed once the device has them.

The receiving buffer and what follows (digest, probe, double buffers) are the same as after a
broadcast; ready, go, done and stop travel through the store (broker.weights.protocol.transfer). The
side being sent is not written while its receivers are awaited. One that was given up may read on
while it is overwritten: it sees the other version in the words or, should memory order ever hide
that, another digest of its copy.

Why a memfd: it has no name in a file system, so the kernel frees it with the last process that has
it open; it is not limited by the size of /dev/shm (64 MiB in many containers); and ``/proc/PID/fd``
is accessible only to the same user (and root) in the same PID namespace. It cannot be truncated
under a reader (F_SEAL_SHRINK), and only the learner can write it (F_SEAL_FUTURE_WRITE, Linux 5.1).
A server releases it when the learner's process ends.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import mmap
import os
import re
import secrets
import select
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

from broker.errors import TransferFailed
from broker.weights.group import WaitMonitor, first_line
from broker.weights.memory.devices import MemoryCard, SharedDevice
from broker.weights.memory.reading import MemoryRead
from broker.weights.memory.staging import PIECE_BYTES, Words
from broker.weights.plan import LayoutPlan

log = logging.getLogger(__name__)

SIDES: Final = 2
PAGE_BYTES: Final = 4096
WORDS_OF_A_SIDE: Final = 8  # a cache line
CARD_AT: Final = 1024  # offset of the card in the page of words: text up to the first zero
DEVICE_PIECE_BYTES: Final = 32 << 20  # per copy on a device, where each piece is awaited
F_SEAL_FUTURE_WRITE: Final = 0x10  # <linux/fcntl.h>; the module fcntl has no name for it
ADDRESS: Final = re.compile(r"([1-9]\d{0,9})/(\d{1,9})/(rlearner-weights-[0-9a-f]{16})")


class SharedSegment:
    """The sender's memory for its two staging buffers, readable by others on this host.

    Args:
        device: of the buffers; None: host memory.

    Attributes:
        address: for ``SegmentReader``: process id, file descriptor, name.
        device: of the buffers.
        on_device: whether they lie in device memory.

    Raises:
        OSError: if there is no such memory here.
    """

    def __init__(self, plan: LayoutPlan, device: SharedDevice | None = None) -> None:
        self._plan = plan
        lent: tuple[Tensor | None, MemoryCard | None] = (
            device.lend(SIDES * _span(plan)) if device is not None else (None, None)
        )
        self._lent, card = lent
        self.device = torch.device("cpu") if self._lent is None else self._lent.device
        self.on_device = self._lent is not None
        name = f"rlearner-weights-{secrets.token_hex(8)}"
        size = size_of(plan) if device is None else PAGE_BYTES
        file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        finalize(self, os.close, file)
        os.ftruncate(file, size)
        self._memory = mmap.mmap(file, size)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
        if card is not None:
            text = card.text.encode()
            self._memory[CARD_AT : CARD_AT + len(text)] = text
        self.address = f"{os.getpid()}/{file}/{name}"

    def buffer(self, side: int) -> Tensor:
        """uint8, shape (plan.size_bytes,), zero."""
        if self._lent is not None:
            return _part(self._lent, self._plan, side)
        return torch.from_numpy(
            np.frombuffer(self._memory, np.uint8, self._plan.size_bytes, _offset(self._plan, side))
        )

    def words(self, side: int) -> Words:
        """int64: [version + 1 or 0 for none, bytes packed]."""
        return _words(self._memory, side)


class SegmentReader:
    """A receiver's read-only view of a segment of another process.

    Args:
        device: opens device memory; None: only host memory can be read.

    Attributes:
        on_device: whether versions are read, and arrive, on the device.

    Raises:
        OSError, ValueError: if it cannot be opened here, or is another segment.
    """

    def __init__(self, address: str, plan: LayoutPlan, device: SharedDevice | None = None) -> None:
        match = ADDRESS.fullmatch(address)
        if match is None:
            raise ValueError("it is not the address of a segment")
        pid = int(match[1])
        path = f"/proc/{match[1]}/fd/{match[2]}"
        name = f"/memfd:{match[3]} (deleted)"
        self.address = address
        self.process = os.pidfd_open(pid)  # readable once it has ended
        finalize(self, os.close, self.process)
        if os.readlink(path) != name:
            raise ValueError("another process has that id here")
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(file).st_size
            if os.readlink(f"/proc/self/fd/{file}") != name or size not in (
                size_of(plan),
                PAGE_BYTES,
            ):
                raise ValueError(f"what lies there is another one, of {size} bytes")
            self._memory: mmap.mmap | None = mmap.mmap(file, size, prot=mmap.PROT_READ)
        finally:
            os.close(file)
        self._plan = plan
        self._device = device
        self.on_device = size == PAGE_BYTES
        self._lent = _opened(self._memory, plan, device) if self.on_device else None

    def take(
        self,
        version: int,
        bucket: Callable[[int], Tensor],
        watch: WaitMonitor,
        *,
        timeout_s: float,
        done: Callable[[int], None],
        peek: Callable[[], None],
    ) -> list[bytes]:
        """Copy a version bucket by bucket as it is packed; return the digests of the copied
        buckets.

        Args:
            bucket: returns the memory for a bucket, by its index.
            timeout_s: how long to wait for more bytes.
            done: called with a bucket's index when it is complete.
            peek: called now and then; raises TransferFailed to end the copy.

        Raises:
            TransferFailed: if the version is gone, no more bytes came, or the wait was cancelled;
                what was copied is invalid then.
        """
        try:
            return self._take(version, bucket, watch, timeout_s=timeout_s, done=done, peek=peek)
        except TransferFailed as error:
            reason = str(error)
        # a copy, because the frames of the original would keep the memory alive with the error
        raise TransferFailed(reason)

    def _take(
        self,
        version: int,
        bucket: Callable[[int], Tensor],
        watch: WaitMonitor,
        timeout_s: float,
        done: Callable[[int], None],
        peek: Callable[[], None],
    ) -> list[bytes]:
        memory = self._memory
        lent = self._lent
        device = self._device
        sides = [
            side
            for side in range(SIDES)
            if memory is not None and _words(memory, side)[0] == version + 1
        ]
        if memory is None or not sides or (lent is None and self.on_device):
            raise TransferFailed(f"version {version} is no longer in the learner's memory")
        if lent is not None and device is not None:
            words = _words(memory, sides[0])
            reading = MemoryRead(
                words,
                version,
                watch,
                timeout_s=timeout_s,
                peek=peek,
                copy=self._fetch,
                piece=DEVICE_PIECE_BYTES,
            )
            try:
                with device.reading():
                    return self._buckets(reading, _part(lent, self._plan, sides[0]), bucket, done)
            except RuntimeError as error:  # torch's, about the device
                raise TransferFailed(
                    f"the learner's memory cannot be read: {first_line(error)}"
                ) from None
        reading = MemoryRead(
            _words(memory, sides[0]),
            version,
            watch,
            timeout_s=timeout_s,
            peek=peek,
            copy=np.copyto,
            piece=PIECE_BYTES,
        )
        source = np.frombuffer(
            memory, np.uint8, self._plan.size_bytes, _offset(self._plan, sides[0])
        )
        return self._buckets(reading, source, bucket, done)

    def _buckets(
        self,
        reading: MemoryRead,
        source: Any,
        bucket: Callable[[int], Tensor],
        done: Callable[[int], None],
    ) -> list[bytes]:
        digests = []
        for index, (start, stop) in enumerate(self._plan.buckets):
            into = bucket(index)
            target = into if isinstance(source, Tensor) else into.numpy()
            digests.append(reading.bucket(source[start:stop], target, start, into))
            done(index)
        return digests

    def _fetch(self, target: Tensor, source: Tensor) -> None:
        """Copy a piece on the device unless its owner has ended, after which its content is
        undefined.
        """
        assert self._device is not None, "the segment is in host memory"
        poller = select.poll()
        poller.register(self.process, select.POLLIN)
        if poller.poll(0):
            raise TransferFailed("the learner's process has ended")
        self._device.copy(target, source)

    def close(self) -> None:
        """Release the memory; processes that still read it keep it until they are done."""
        self._memory = self._lent = None


def is_here(address: str) -> bool:
    """Return whether a segment's memory is on this host and of this user."""
    match = ADDRESS.fullmatch(address)
    try:
        return (
            match is not None
            and os.readlink(f"/proc/{match[1]}/fd/{match[2]}") == f"/memfd:{match[3]} (deleted)"
        )
    except OSError:
        return False


class LocalLearner:
    """A receiver's view of its host's learner: the window, until that process ends or another one
    is reached.

    Args:
        device: opens device memory, see ``SegmentReader``.
    """

    def __init__(self, device: SharedDevice | None = None) -> None:
        self._device = device
        self.window: SegmentReader | None = None
        self.problem = ""  # why the last address cannot be read from here
        self._tried = ""

    def reach(self, address: str, plan: LayoutPlan) -> SegmentReader | None:
        """Return the window on a segment, None if it cannot be opened here. Call it in the event
        loop.
        """
        if self.window is not None and self.window.address != address:
            self.leave()
        if self.window is None and address and address != self._tried:
            self._tried = address
            self.problem = ""
            try:
                self.window = SegmentReader(address, plan, self._device)
            except (OSError, ValueError) as error:
                self.problem = (
                    error.strerror or type(error).__name__
                    if isinstance(error, OSError)
                    else str(error)
                )
            else:
                asyncio.get_running_loop().add_reader(self.window.process, self.leave)
        return self.window

    def leave(self) -> None:
        """Release the window."""
        if self.window is not None:
            self.window.close()
            with suppress(RuntimeError):  # the loop is closed
                asyncio.get_running_loop().remove_reader(self.window.process)
            self.window = None
            self._tried = ""


def segment_of(plan: LayoutPlan, device: SharedDevice | None = None) -> SharedSegment | None:
    """Return memory that servers of this host can read, on the device if possible; None if there is
    none.
    """
    if device is not None:
        try:
            return SharedSegment(plan, device)
        except OSError as error:
            problem = "the device has none to share"
            log.warning(
                "weights: servers of this host read host memory, because %s: %s",
                problem,
                error.strerror,
            )
    try:
        return SharedSegment(plan)
    except OSError as error:
        log.warning(
            "weights: servers of this host use gloo, because there is no memory to share here: %s",
            error,
        )
        return None


def size_of(plan: LayoutPlan) -> int:
    """Return the bytes of a segment whose buffers hold versions of this plan."""
    return _offset(plan, SIDES)


def _span(plan: LayoutPlan) -> int:
    return -(-plan.size_bytes // PAGE_BYTES) * PAGE_BYTES


def _offset(plan: LayoutPlan, side: int) -> int:
    return PAGE_BYTES + side * _span(plan)


def _part(lent: Tensor, plan: LayoutPlan, side: int) -> Tensor:
    return lent[side * _span(plan) :][: plan.size_bytes]


def _words(memory: mmap.mmap, side: int) -> Words:
    return np.frombuffer(memory, np.int64, 2, side * WORDS_OF_A_SIDE * 8)


def _opened(page: mmap.mmap, plan: LayoutPlan, device: SharedDevice | None) -> Tensor:
    card = MemoryCard.from_text(page[CARD_AT:].partition(b"\0")[0].decode("ascii", "replace"))
    if card.size_bytes != SIDES * _span(plan):
        raise ValueError(f"what lies there is another one, of {card.size_bytes} bytes")
    if device is None or device.kind != card.kind:
        local_kind = "host" if device is None else device.kind
        raise ValueError(
            f"it lies in {card.kind} memory, and weights arrive in {local_kind} memory here"
        )
    return device.open(card)
