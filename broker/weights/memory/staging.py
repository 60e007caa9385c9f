"""Flat buffers between the model and the wire, and the sender's pair of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Final, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from broker.errors import TransferFailed
from broker.weights import fp8
from broker.weights.digest import BucketDigest, combine, digest_bucket
from broker.weights.memory.copying import copy_into
from broker.weights.plan import LayoutPlan, TensorSlot, TensorSpec, make_plan

PIECE_BYTES: Final = 2 << 20  # copied, and digested, at a time: a tile of the digest
LOOK_AGAIN_S: Final = 0.1  # waiters are notified; this bounds the cost of a missed notification

Words: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]


def plan_of(
    tensors: Mapping[str, Tensor], bucket_mib: float, *, dtype: str | None = None
) -> LayoutPlan:
    """Return the plan of a model's named tensors; tensors that share memory count once, under the
    first name.

    Args:
        tensors: for example ``model.state_dict()`` or ``dict(model.named_parameters())``; may be
            meta tensors.
        dtype: of floating-point tensors on the wire, torch's name or ``fp8``; None: their own.
    """
    specs: list[TensorSpec] = []
    memories: set[tuple[int, int, tuple[int, ...], tuple[int, ...]]] = set()
    for name, tensor in tensors.items():
        memory = (
            tensor.untyped_storage()._cdata,
            int(tensor.storage_offset()),
            tuple(tensor.shape),
            tensor.stride(),
        )
        if memory in memories:
            continue
        memories.add(memory)
        spec = TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        if dtype is not None and dtype != fp8.NAME and tensor.is_floating_point():
            spec = replace(spec, dtype=dtype)
        specs += fp8.specs_of(spec) if dtype == fp8.NAME else [spec]
    return make_plan(specs, bucket_mib)


class FlatBuffer:
    """One model's tensors in one buffer.

    Args:
        buffer: all zero; None: new memory on ``device``.
        firsts: where tensors of the plan begin in those that they are parts of, in elements; 0 by
            default.

    Attributes:
        buffer: uint8, shape (plan.size_bytes,); gaps are zero.
        tensors: the planned tensors by name, as views of the buffer.
    """

    def __init__(
        self,
        plan: LayoutPlan,
        device: str | torch.device = "cpu",
        buffer: Tensor | None = None,
        firsts: Mapping[str, int] | None = None,
    ) -> None:
        self.plan = plan
        self._firsts = firsts or {}
        self.buffer = (
            torch.zeros(plan.size_bytes, dtype=torch.uint8, device=device)
            if buffer is None
            else buffer
        )
        self.tensors = {slot.spec.name: self._view(slot) for slot in plan.slots}

    def _view(self, slot: TensorSlot) -> Tensor:
        data = self.buffer[slot.offset : slot.stop]
        return data.view(getattr(torch, slot.spec.dtype)).view(slot.spec.shape)

    def bucket(self, index: int) -> Tensor:
        """Return the bytes of a bucket, a uint8 view."""
        start, stop = self.plan.buckets[index]
        return self.buffer[start:stop]

    def fill(
        self, tensors: Mapping[str, Tensor], reached: Callable[[int], None] = lambda offset: None
    ) -> None:
        """Copy (and cast or quantize) every planned tensor into the buffer; return once the copy is
        done.

        Args:
            reached: called at least once per bucket with the offset below which all bytes are in
                place.

        Raises:
            TransferFailed: if a tensor is missing or has another shape.
        """
        reported_offset = 0
        gpu = self.buffer.device if self.buffer.is_cuda else None
        piece = min(PIECE_BYTES, self.plan.bucket_bytes)
        with torch.no_grad():
            # scales that were written with their matrices, which precede them
            scaled: set[str] = set()
            # in order and once: a sharded trainer gathers each on access
            for slot in self.plan.slots:
                if slot.spec.name in scaled:
                    continue
                source = self._source(tensors, slot)
                gpu = source.device if gpu is None and source.is_cuda else gpu
                step = piece if gpu is None else self.plan.bucket_bytes  # each step waits for a GPU
                target = self.tensors[slot.spec.name]
                scale = slot.spec.name + fp8.SCALE
                steps = self._copy(slot, source, step)
                if target.dtype == fp8.FLOAT8 != source.dtype and scale in self.tensors:
                    scaled.add(scale)
                    offsets = fp8.quantise(
                        source, target, self.tensors[scale], self.plan.bucket_bytes
                    )
                    steps = map(slot.offset.__add__, offsets)
                for offset in steps:
                    if offset - reported_offset >= step:
                        _settle(gpu)
                        reached(offset)
                        reported_offset = offset // step * step
        _settle(gpu)
        reached(self.plan.size_bytes)

    def _source(self, tensors: Mapping[str, Tensor], slot: TensorSlot) -> Tensor:
        name = slot.spec.name
        shape = slot.spec.shape
        source = tensors.get(name)
        if source is None:
            raise TransferFailed(f"weights: {name} is planned but missing")
        if tuple(source.shape) != shape:
            raise TransferFailed(
                f"weights: {name}: expected shape {list(shape)}, got {list(source.shape)}"
            )
        return source

    def _copy(self, slot: TensorSlot, source: Tensor, size: int) -> Iterator[int]:
        """Copy one tensor, in pieces of this size if it can be split; yield the progress."""
        target = self.tensors[slot.spec.name]
        first = self._firsts.get(slot.spec.name, 0)
        if slot.offset // size == (slot.stop - 1) // size or not source.is_contiguous():
            copy_into(target, source, first=first, non_blocking=True)
            yield slot.stop
            return
        item = target.itemsize
        offset = slot.offset
        into = target.view(-1)
        out_of = source.view(-1)
        while offset < slot.stop:
            end = min((offset // size + 1) * size, slot.stop)
            span = slice((offset - slot.offset) // item, (end - slot.offset) // item)
            copy_into(into[span], out_of[span], first=first + span.start, non_blocking=True)
            offset = end
            yield offset

    def digest(self) -> str:
        """Return the hex digest of all buckets."""
        return combine(
            [digest_bucket(self.bucket(index)) for index in range(len(self.plan.buckets))]
        )


def _settle(gpu: torch.device | None) -> None:
    if gpu is not None:
        torch.cuda.current_stream(gpu).synchronize()


class StagedVersion:
    """One side of the staging: a version being packed, or complete. It may be sent and digested
    while it is packed.

    Args:
        words: int64, shape (2,), for readers in other processes: version + 1 or 0 for none, bytes
            packed.
    """

    def __init__(self, flat: FlatBuffer, words: Words | None = None) -> None:
        self.flat = flat
        self.plan = flat.plan
        self._words = words if words is not None else np.zeros(2, np.int64)
        self.version = -1  # -1: nothing
        self.digest: str | None = None  # hex, of all buckets, once known
        self.sending = False
        self.lock = threading.Lock()  # held while the version changes or one bucket is digested
        self._packed_bytes = 0
        self._told = threading.Condition()

    def __len__(self) -> int:
        return len(self.plan.buckets)

    def __getitem__(self, index: int) -> Tensor | None:
        """Return a bucket's bytes; None while it is not packed.

        Raises:
            TransferFailed: if packing failed.
        """
        if self.version < 0:
            raise TransferFailed("the weights could not be packed")
        return (
            self.flat.bucket(index) if self._packed_bytes >= self.plan.buckets[index][1] else None
        )

    @property
    def packed_bytes(self) -> int:
        """Offset below which all bytes are in place."""
        return self._packed_bytes

    def open(self, version: int) -> None:
        """Begin a version; the previous content is gone."""
        with self.lock:
            self._words[:] = 0
            # first: a reader that sees the new version must not take the old one's bytes for packed
            self._packed_bytes = 0
            self.digest = None
            self.version = version
            self._words[0] = version + 1

    def reached(self, offset: int) -> None:
        """Note that all bytes below are in place."""
        with self._told:
            self._packed_bytes = self._words[1] = offset
            self._told.notify_all()

    def failed(self) -> None:
        """Note that it will never be complete."""
        with self._told:
            self.version = -1
            self._words[0] = 0
            self._told.notify_all()

    def take_digest(self, version: int) -> str | None:
        """Return the digest of a version, computed while it is packed; None if packing failed or it
        was overwritten.
        """
        digests: list[bytes] = []
        for index, (start, stop) in enumerate(self.plan.buckets):
            digest = BucketDigest(self.flat.bucket(index))
            position = start
            while position < stop:  # close behind the copy, while the bytes are in the cache
                with self._told:
                    while self.version == version and self._packed_bytes < min(
                        position + PIECE_BYTES, stop
                    ):
                        self._told.wait(LOOK_AGAIN_S)
                    position = min(self._packed_bytes, position + PIECE_BYTES, stop)
                with self.lock:
                    if self.version != version:
                        return None
                    digest.add(position - start)
                    if position == stop:
                        digests.append(digest.finish())
        whole = combine(digests)
        with self.lock:
            if self.version != version:
                return None
            self.digest = whole
        return whole


class StagingMemory(Protocol):
    """Memory for staging buffers that other processes can read."""

    def buffer(self, side: int, /) -> Tensor: ...

    def words(self, side: int, /) -> Words: ...


class StagingBuffers:
    """Two buffers: the newest version stays on offer in one while the next is copied into the
    other.

    The one being sent is never written. If that is not the newest, the newest is overwritten, which
    no server needs any more. So writing waits only for the copy, and at most for the digest of one
    bucket.

    Args:
        memory: for the buffers; None: new memory on ``device``.
        firsts: see ``FlatBuffer``.

    Attributes:
        device: of the buffers.
    """

    def __init__(
        self,
        plan: LayoutPlan,
        device: str | torch.device = "cpu",
        memory: StagingMemory | None = None,
        firsts: Mapping[str, int] | None = None,
    ) -> None:
        self._memory = memory  # kept open while its buffers are in use
        if memory is None:
            self._sides = tuple(
                StagedVersion(FlatBuffer(plan, device, firsts=firsts)) for _ in range(2)
            )
        else:
            buffers = [FlatBuffer(plan, buffer=memory.buffer(side)) for side in range(2)]
            self._sides = tuple(
                StagedVersion(flat, memory.words(side)) for side, flat in enumerate(buffers)
            )
        self._choose = threading.Lock()
        self.plan = plan
        self.device = self._sides[0].flat.buffer.device

    def write(
        self, version: int, tensors: Mapping[str, Tensor], begun: Callable[[], None] = lambda: None
    ) -> None:
        """Copy a version in. Versions increase; one writer at a time.

        Args:
            begun: called before the first byte is copied; from then on the version can be digested
                and sent.

        Raises:
            TransferFailed: if a tensor is missing or has another shape.
        """
        with self._choose:
            side = min(
                (side for side in self._sides if not side.sending), key=lambda side: side.version
            )
            side.open(version)
        try:
            begun()
            side.flat.fill(tensors, side.reached)
        except BaseException:
            side.failed()
            raise

    def digest(self, version: int) -> str | None:
        """Return the hex digest of a version once it is packed; None if it was overwritten or could
        not be packed.
        """
        side = self._find(version)
        return side.take_digest(version) if side is not None else None

    def copy_out(self, version: int, into: FlatBuffer) -> bool:
        """Copy a complete version into another buffer of its plan; return False if it was
        overwritten.
        """
        side = self._find(version)
        if side is None:
            return False
        for index in range(len(self.plan.buckets)):
            with side.lock:  # one bucket at a time, because the writer waits for it
                if side.version != version or side[index] is None:
                    return False
                copy_into(into.bucket(index), side.flat.bucket(index))
        return True

    @contextmanager
    def sending(self, version: int) -> Iterator[StagedVersion]:
        """Keep a version unchanged while it is sent; one at a time.

        Raises:
            TransferFailed: if it was overwritten by a newer one.
        """
        with self._choose:
            side = self._find(version)
            if side is None:
                raise TransferFailed(f"version {version} was superseded before it was sent")
            side.sending = True
        try:
            yield side
        finally:
            side.sending = False

    def _find(self, version: int) -> StagedVersion | None:
        return next((side for side in self._sides if side.version == version), None)
