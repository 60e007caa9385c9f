"""The bytes of a transfer, bucket by bucket: the whole bucket, or what changed since the receivers'
version.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from broker.errors import TransferFailed
from broker.weights import delta
from broker.weights.memory.copying import copy_into
from broker.weights.memory.staging import FlatBuffer, StagedVersion
from broker.weights.plan import LayoutPlan
from broker.weights.store_messages import StoreMessages

# sent instead of a size: the bucket itself follows, because its difference is not smaller
WHOLE: Final = "whole"
MAX_DIGITS: Final = 18


class ReferenceBytes:
    """The sender's copy of the bytes that the receivers of its last transfer hold; as large as the
    model.

    Args:
        full_every: at least one of this many consecutive transfers sends everything.
    """

    def __init__(
        self, plan: LayoutPlan, full_every: int, device: str | torch.device = "cpu"
    ) -> None:
        self.flat = FlatBuffer(plan, device)
        self.word = delta.word_bytes(plan)
        self._full_every = full_every
        self._digest = ""  # unknown
        self._since_full = 0

    def fits(self, held: Sequence[str]) -> bool:
        """Decide whether all holders of these digests can use a difference from it, and a full
        transfer is not due.
        """
        is_due = self._since_full + 1 >= self._full_every
        return bool(self._digest) and all(digest == self._digest for digest in held) and not is_due

    def begin(self) -> None:
        """Note that until ``end`` the receivers' bytes are unknown."""
        self._digest = ""

    def end(self, digest: str, *, whole: bool) -> None:
        """Note that all receivers have confirmed these bytes."""
        self._digest = digest
        self._since_full = 0 if whole else self._since_full + 1


class OutgoingBuckets:
    """The sender's buckets, each available once it is packed.

    Attributes:
        size_bytes: sent so far.
    """

    def __init__(
        self,
        staged: StagedVersion,
        base: ReferenceBytes | None,
        lines: StoreMessages,
        *,
        whole: bool,
    ) -> None:
        self._staged = staged
        self._base = base
        self._lines = lines
        self._whole = whole
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._staged)

    def __getitem__(self, index: int) -> Tensor | None:
        bucket = self._staged[index]
        if bucket is None:
            return None
        if not self._whole:
            assert self._base is not None, "a difference needs something to differ from"
            changes = delta.difference(bucket, self._base.flat.bucket(index), self._base.word)
            self._lines.say(f"size/{index}", WHOLE if changes is None else str(len(changes)))
            bucket = bucket if changes is None else changes
        self.size_bytes += len(bucket)
        return bucket

    def sent(self, index: int) -> None:
        """Note that the receivers will hold this bucket."""
        if self._base is not None:
            copy_into(self._base.flat.bucket(index), self._staged.flat.bucket(index))


class IncomingBuckets:
    """The receiver's buckets, being written into ``flat``.

    Args:
        base: the bytes that a difference refers to; None: those in ``flat``.
    """

    def __init__(
        self, flat: FlatBuffer, lines: StoreMessages, *, whole: bool, base: FlatBuffer | None = None
    ) -> None:
        self._flat = flat
        self._lines = lines
        self._whole = whole
        self._base = base or flat
        self._word = delta.word_bytes(flat.plan)
        self._changes: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self._flat.plan.buckets)

    def __getitem__(self, index: int) -> Tensor | None:
        bucket = self._flat.bucket(index)
        if self._whole or (size := self._lines.heard(f"size/{index}")) == WHOLE:
            return bucket
        if size is None:
            return None
        if not (
            size.isascii()
            and size.isdigit()
            and len(size) <= MAX_DIGITS
            and 0 < int(size) < len(bucket)
        ):
            problem = f"bucket {index} of {len(bucket)} bytes was announced with a difference of {size[:80]!r} bytes"
            raise TransferFailed(problem)
        self._changes[index] = torch.empty(int(size), dtype=torch.uint8, device=bucket.device)
        return self._changes[index]

    def arrived(self, index: int) -> Tensor:
        """Return the complete bucket."""
        bucket = self._flat.bucket(index)
        if (changes := self._changes.pop(index, None)) is not None:
            if self._base is not self._flat:
                copy_into(bucket, self._base.bucket(index))
            delta.apply(changes, bucket, self._word)
        return bucket
