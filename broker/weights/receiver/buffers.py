"""Buffers in which a receiver's versions arrive: two if the engine computes from one while the next
fills.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from broker.weights.bucket_payload import IncomingBuckets
from broker.weights.memory.staging import FlatBuffer
from broker.weights.plan import LayoutPlan
from broker.weights.store_messages import StoreMessages


@dataclass(frozen=True)
class IncomingVersion:
    """A version being received.

    Attributes:
        flat: filled by the transfer, and used by nothing else.
        base: what a difference refers to; ``flat`` itself if the bytes are there.
        held: digest of ``base``, empty if unknown.
    """

    flat: FlatBuffer
    base: FlatBuffer
    held: str

    @property
    def plan(self) -> LayoutPlan:
        """Of what arrives."""
        return self.flat.plan

    @property
    def device(self) -> torch.device:
        """Where it arrives."""
        return self.flat.buffer.device

    def put(self, offset: int, part: torch.Tensor) -> None:
        """Write a part of the flat buffer; for several threads."""
        self.flat.buffer[offset : offset + part.numel()].copy_(part)

    def incoming(self, lines: StoreMessages, *, whole: bool) -> IncomingBuckets:
        """Return the buckets to receive into."""
        return IncomingBuckets(self.flat, lines, whole=whole, base=self.base)


class ReceiveBuffers:
    """One buffer, or two that take turns for an engine that keeps what it is given.

    Args:
        kept: whether the engine computes from the tensors of its last update; otherwise it copies
            them.
    """

    def __init__(self, *, kept: bool) -> None:
        self._kept = kept
        self._flat: FlatBuffer | None = None  # the newest complete one
        self._held = ""  # its digest, empty if unknown
        self._in_use = False  # whether the engine computes from it
        self._spare: FlatBuffer | None = None

    def hold(
        self, plan: LayoutPlan, tensors: Mapping[str, torch.Tensor], device: torch.device
    ) -> str:
        """Copy what the engine starts with, and return its digest."""
        self._flat = FlatBuffer(plan, device)
        self._in_use = False
        self._flat.fill(tensors)
        self._held = self._flat.digest()
        return self._held

    def whole(self) -> FlatBuffer | None:
        """Return the newest complete buffer, None without one."""
        return self._flat

    def take(self, plan: LayoutPlan, device: torch.device) -> IncomingVersion:
        """Return the buffer for the next version; one of a failed transfer is not reused, as it may
        still be written.

        Args:
            plan: of what arrives.
            device: where it arrives.
        """
        if self._flat is not None and (
            self._flat.plan != plan or self._flat.buffer.device.type != device.type
        ):
            self._forget()
        if self._flat is None:
            fresh = FlatBuffer(plan, device)
            return IncomingVersion(fresh, fresh, "")
        base = self._flat
        digest = self._held
        if self._in_use:
            target = self._spare or FlatBuffer(plan, device)
            self._spare = None
            return IncomingVersion(target, base, digest)
        self._flat = None
        self._held = ""
        return IncomingVersion(base, base, digest)

    def arrived(self, arrival: IncomingVersion, digest: str) -> None:
        """Note that a version is complete; the engine loads it next."""
        self._spare = self._flat if self._in_use else None
        self._flat = arrival.flat
        self._held = digest
        self._in_use = self._kept

    def load_failed(self) -> None:
        """Note that the engine may now compute from either buffer, so that neither is written
        again.
        """
        if self._kept:
            self._forget()

    def rest(self) -> None:
        """Let the memory go that the engine does not use; the next version has no base."""
        self._forget()

    def _forget(self) -> None:
        self._flat = None
        self._held = ""
        self._in_use = False
        self._spare = None
