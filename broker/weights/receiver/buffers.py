"""Where a receiver's versions arrive. An engine that keeps the tensors of an update computes from one buffer while the
next fills.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from broker.weights.memory.staging import FlatBuffer
from broker.weights.plan import LayoutPlan


@dataclass(frozen=True)
class IncomingVersion:
    """One version on its way in.

    Attributes:
        flat: filled by the transfer; nobody else writes or reads it.
        base: what a difference is one from; ``flat`` itself where it lies there already.
        held: digest of what lies in ``base``, empty when unknown.
    """

    flat: FlatBuffer
    base: FlatBuffer
    held: str


class ReceiveBuffers:
    """One buffer, or with an engine that keeps what it is given, two that take turns.

    Args:
        kept: the engine computes from the tensors of its last update; else it copies them.
    """

    def __init__(self, *, kept: bool) -> None:
        self._kept = kept
        self._flat: FlatBuffer | None = None  # the newest that is whole
        self._held = ""  # its digest, empty when unknown
        self._in_use = False  # the engine computes from it
        self._spare: FlatBuffer | None = None

    def hold(self, plan: LayoutPlan, tensors: Mapping[str, torch.Tensor], device: torch.device) -> str:
        """Take a copy of what the engine starts with; its digest."""
        self._flat, self._in_use = FlatBuffer(plan, device), False
        self._flat.fill(tensors)
        self._held = self._flat.digest()
        return self._held

    def whole(self) -> FlatBuffer | None:
        """The newest that is whole, None when there is none."""
        return self._flat

    def take(self, plan: LayoutPlan, device: torch.device) -> IncomingVersion:
        """For the next version. A transfer that fails may go on writing into it, so only what has arrived is used
        again.

        Args:
            plan: of what comes.
            device: where it comes.
        """
        if self._flat is not None and (self._flat.plan != plan or self._flat.buffer.device.type != device.type):
            self._forget()
        if self._flat is None:
            fresh = FlatBuffer(plan, device)
            return IncomingVersion(fresh, fresh, "")
        base, held = self._flat, self._held
        if self._in_use:
            target, self._spare = self._spare or FlatBuffer(plan, device), None
            return IncomingVersion(target, base, held)
        self._flat, self._held = None, ""
        return IncomingVersion(base, base, held)

    def arrived(self, arrival: IncomingVersion, digest: str) -> None:
        """It is whole; the engine loads it next."""
        self._spare = self._flat if self._in_use else None
        self._flat, self._held, self._in_use = arrival.flat, digest, self._kept

    def load_failed(self) -> None:
        """The engine may compute from either now, so neither is written again."""
        if self._kept:
            self._forget()

    def _forget(self) -> None:
        self._flat, self._held, self._in_use, self._spare = None, "", False, None
