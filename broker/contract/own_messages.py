"""Rules of messages that are not in the contract: those of a program that uses the streams for
something else.

A message's own ``__post_init__`` may raise ValueError for what it does not allow; msgspec calls it
on decoding, too.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, get_args

import msgspec
import numpy as np

from broker.contract import wire
from broker.contract.sizes import MAX_PAYLOAD_BYTES, MAX_SMALL_BYTES
from broker.errors import WireError


def check(message: wire.Message) -> None:
    """Check that every number is finite and that columns hold whole values.

    Raises:
        WireError: if one does not; names the message, the field and the rule.
    """
    for field in message.__struct_fields__:
        if rule := _find_violation(getattr(message, field)):
            raise WireError(f"{type(message).__name__}.{field}: {rule}")


def _find_violation(value: Any) -> str:
    """Return the first rule that a value breaks, or nothing."""
    if isinstance(value, float):
        return "" if math.isfinite(value) else f"{value}; must be finite"
    if isinstance(value, wire.Column):
        width = np.dtype(value.dtype).itemsize
        if len(value.data) % width:
            return f"{len(value.data)} bytes; must be a multiple of {width} for dtype {value.dtype}"
        if value.dtype == "<f4" and not np.isfinite(value.array()).all():
            return "holds NaN or infinity; must be finite"
        return ""
    if isinstance(value, msgspec.Struct):
        inner: Any = [getattr(value, field) for field in value.__struct_fields__]
    elif isinstance(value, dict):
        inner = value.values()
    else:
        inner = value if isinstance(value, list | tuple | set | frozenset) else ()
    return next(filter(None, map(_find_violation, inner)), "")


def max_bytes(kind: type[wire.Message]) -> int:
    """Return the largest encoding of a message: small, unless a field holds columns or bytes."""
    fixed_limit = wire.MAX_BYTES.get(kind)
    return _max_own_bytes(kind) if fixed_limit is None else fixed_limit


@cache
def _max_own_bytes(kind: type[wire.Message]) -> int:
    fields = msgspec.structs.fields(kind)
    if any(_holds_bytes(field.type) for field in fields):
        return MAX_PAYLOAD_BYTES
    return MAX_SMALL_BYTES


def _holds_bytes(annotation: Any) -> bool:
    return annotation in (wire.Column, bytes) or any(
        _holds_bytes(inner) for inner in get_args(annotation)
    )
