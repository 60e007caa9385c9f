"""Receives a version in passing: complete tensors are handed on, and only a few buckets are in
memory at a time.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from broker.errors import TransferFailed
from broker.weights.group import IN_FLIGHT, WaitMonitor
from broker.weights.plan import LayoutPlan, TensorSlot
from broker.weights.store_messages import StoreMessages

# on the wire, and complete but not loaded; further ones wait at the sender
MOST_BUCKETS: Final = 2 * IN_FLIGHT
LOOK_S: Final = 0.05

NamedTensors = list[tuple[str, Tensor]]


class BucketStream:
    """What arrives of one version; the receiving thread writes it, the loading one reads it.

    A tensor that lies in one bucket is a view of it. One that spans several is put together in
    memory of its own.

    Args:
        plan: of the model.
        device: of the buckets.

    Attributes:
        held: empty: no earlier version is kept, so everything must be sent.
    """

    held: Final = ""

    def __init__(self, plan: LayoutPlan, device: torch.device) -> None:
        self.plan = plan
        self.device = device
        self._buckets: dict[int, Tensor] = {}  # on the wire
        # bytes of a tensor, and how many have arrived
        self._unfinished: dict[str, tuple[Tensor, int]] = {}
        self._ready: queue.SimpleQueue[NamedTensors | None] = queue.SimpleQueue()
        self._room = MOST_BUCKETS
        self._lock = threading.Lock()

    def incoming(self, lines: StoreMessages, *, whole: bool) -> BucketStream:
        """Return the buckets to receive into.

        Raises:
            TransferFailed: if only changes are sent.
        """
        if not whole:
            raise TransferFailed(
                "the learner sends only changes, but nothing is held here that they refer to"
            )
        return self

    def __len__(self) -> int:
        return len(self.plan.buckets)

    def __getitem__(self, index: int) -> Tensor | None:
        """Return memory for a bucket; None while too many wait to be loaded."""
        with self._lock:
            if self._room == 0:
                return None
            self._room -= 1
        start, stop = self.plan.buckets[index]
        bucket = self._buckets[index] = torch.empty(
            stop - start, dtype=torch.uint8, device=self.device
        )
        return bucket

    def arrived(self, index: int) -> Tensor:
        """Hand on the tensors that a bucket completes; return the bucket."""
        bucket, (start, _) = self._buckets.pop(index), self.plan.buckets[index]
        if bucket.is_cuda:  # another thread, with another stream, reads it next
            torch.cuda.current_stream(bucket.device).synchronize()
        self._ready.put(self._completed(start, bucket))
        return bucket

    def put(self, offset: int, part: Tensor) -> None:
        """Hand on the tensors that a part of the model's flat buffer completes; for several
        threads.
        """
        with self._lock:
            complete = self._completed(offset, part)
        if complete:
            self._ready.put(complete)

    def _completed(self, start: int, data: Tensor) -> NamedTensors:
        complete: NamedTensors = []
        for slot in self.plan.slots_between(start, start + data.numel()):
            first = max(slot.offset, start)
            last = min(slot.stop, start + data.numel())
            part = data[first - start : last - start]
            if last - first < slot.spec.size_bytes:
                if slot.spec.name not in self._unfinished:
                    self._unfinished[slot.spec.name] = self._fresh(slot), 0
                whole, so_far = self._unfinished.pop(slot.spec.name)
                whole[first - slot.offset : last - slot.offset].copy_(part)
                if so_far + last - first < slot.spec.size_bytes:
                    self._unfinished[slot.spec.name] = whole, so_far + last - first
                    continue
                part = whole
            complete.append(
                (slot.spec.name, part.view(getattr(torch, slot.spec.dtype)).view(slot.spec.shape))
            )
        return complete

    def _fresh(self, slot: TensorSlot) -> Tensor:
        return torch.empty(slot.spec.size_bytes, dtype=torch.uint8, device=self.device)

    def end(self) -> None:
        """Note that nothing more comes, because all has arrived or the transfer failed."""
        self._ready.put(None)

    def tensors(self, watch: WaitMonitor, timeout_s: float) -> Iterator[NamedTensors]:
        """Yield the tensors of each bucket as they come, until the end; each list is loaded before
        the next is read.

        Raises:
            TransferFailed: if nothing comes for ``timeout_s``, or the wait was cancelled.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                bucket = self._ready.get(timeout=LOOK_S)
            except queue.Empty:
                watch.beat()
                if time.monotonic() > deadline:
                    raise TransferFailed(f"no bucket came within {timeout_s:g} s") from None
                continue
            if bucket is None:
                return
            yield bucket
            deadline = time.monotonic() + timeout_s
            with self._lock:
                self._room += 1
