"""Plans which bytes of a model travel in which bucket; sender and receivers must compute the same
plan.

All tensors lie in one flat buffer, ordered by name, at aligned offsets; a bucket is a fixed-size
slice of it, so that buckets are equally large however uneven the tensors are. The order is by name
because trainers and engines list the same tensors differently.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from broker.errors import UserError, WireError

ALIGN_BYTES: Final = 64
BUCKET_ALIGN_BYTES: Final = 4096
ITEM_BYTES: Final = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and dtype (torch's name without ``torch.``) of one tensor as it travels."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class TensorSlot:
    """Position of a tensor in the flat buffer."""

    spec: TensorSpec
    offset: int

    @property
    def stop(self) -> int:
        return self.offset + self.spec.size_bytes


@dataclass(frozen=True)
class LayoutPlan:
    """Layout of a model.

    Attributes:
        slots: tensors ordered by name, tied ones once.
        bucket_bytes: size of every bucket but the last.
        size_bytes: size of the flat buffer, including gaps between tensors.
    """

    slots: tuple[TensorSlot, ...]
    bucket_bytes: int
    size_bytes: int

    @cached_property
    def buckets(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of every bucket in the flat buffer."""
        starts = range(0, self.size_bytes, self.bucket_bytes)
        return tuple((start, min(start + self.bucket_bytes, self.size_bytes)) for start in starts)

    def slots_between(self, start: int, stop: int) -> tuple[TensorSlot, ...]:
        """Return the tensors of which at least one byte lies in this part of the flat buffer, in
        order.
        """
        first = bisect.bisect_right(self._stops, start)
        last = bisect.bisect_left(self.slots, stop, key=lambda slot: slot.offset)
        return tuple(slot for slot in self.slots[first:last] if slot.spec.size_bytes)

    @cached_property
    def _stops(self) -> list[int]:
        return [slot.stop for slot in self.slots]

    @cached_property
    def text(self) -> str:
        """The plan as one line of JSON; ``from_text`` reads it."""
        tensors = [[slot.spec.name, list(slot.spec.shape), slot.spec.dtype] for slot in self.slots]
        return json.dumps(
            {"bucket_bytes": self.bucket_bytes, "tensors": tensors}, separators=(",", ":")
        )

    @cached_property
    def digest(self) -> str:
        """Hex digest of ``text``, equal for equal plans only."""
        return hashlib.blake2b(self.text.encode(), digest_size=16).hexdigest()

    def difference(self, offered: LayoutPlan) -> str:
        """Return the first difference from another plan in one line, empty for equal plans."""
        mine, theirs = (
            {slot.spec.name: slot.spec for slot in plan.slots} for plan in (self, offered)
        )
        for name in sorted(mine.keys() | theirs.keys()):
            if name not in mine:
                return f"{theirs[name]} is in the offer but not here"
            if name not in theirs:
                return f"{mine[name]} is here but not in the offer"
            if mine[name] != theirs[name]:
                return f"{mine[name]} here is {theirs[name]} in the offer"
        if self.bucket_bytes != offered.bucket_bytes:
            return f"buckets of {self.bucket_bytes} bytes here are {offered.bucket_bytes} bytes in the offer"
        return ""


def make_plan(specs: Iterable[TensorSpec], bucket_mib: float) -> LayoutPlan:
    """Lay out tensors given in any order.

    Raises:
        UserError: for no tensors, a repeated name, a dtype that cannot travel, or a bucket size
            that is not positive.
    """
    ordered = sorted(specs, key=lambda spec: spec.name)
    if not ordered:
        raise UserError("weights: the model has no tensors to send")
    if not bucket_mib > 0:
        raise UserError(
            f"weights: a bucket of {bucket_mib} MiB is not allowed; use a positive size"
        )
    slots: list[TensorSlot] = []
    offset = 0
    for spec in ordered:
        if spec.dtype not in ITEM_BYTES:
            raise UserError(
                f"weights: {spec.name} has dtype {spec.dtype}; known: {', '.join(ITEM_BYTES)}"
            )
        if slots and slots[-1].spec.name == spec.name:
            raise UserError(f"weights: two tensors are named {spec.name}")
        slots.append(TensorSlot(spec, offset))
        offset = _round_up(slots[-1].stop, ALIGN_BYTES)
    bucket_bytes = _round_up(math.ceil(bucket_mib * 2**20), BUCKET_ALIGN_BYTES)
    return LayoutPlan(tuple(slots), bucket_bytes, max(offset, ALIGN_BYTES))


def decoded(data: bytes) -> str:
    """Return a text that another process wrote.

    Raises:
        WireError: if it is not text.
    """
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise WireError(f"not a plan of weights: {error}") from None


def from_text(text: str) -> LayoutPlan:
    """Return a plan that another process wrote.

    Raises:
        WireError: if it is not a plan.
    """
    try:
        fields = json.loads(text)
        entries = fields["tensors"]
        specs = [
            TensorSpec(str(name), tuple(int(n) for n in shape), str(dtype))
            for name, shape, dtype in entries
        ]
        return make_plan(specs, int(fields["bucket_bytes"]) / 2**20)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, UserError) as error:
        raise WireError(f"not a plan of weights: {error}") from None


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
