"""Encodes and decodes messages as MessagePack, within the size limits and rules of the contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from broker.contract import checks, wire
from broker.contract.own_messages import max_bytes
from broker.contract.sizes import COUNT_FROM_BYTES, Buffer, has_too_many_items, max_items
from broker.errors import TooLarge, WireError

M = TypeVar("M", bound=wire.Message)

_ENCODER = msgspec.msgpack.Encoder()
# decoder and most bytes
_DECODERS: dict[tuple[type[wire.Message], ...], tuple[Callable[[Buffer], Any], int]] = {}


class _Nothing(wire.Message, frozen=True, tag=""):
    """A type that no message has."""


def encode(message: wire.Message) -> bytes:
    """Check and encode one message.

    Raises:
        TooLarge: if it exceeds ``own_messages.max_bytes`` or ``max_items``.
        WireError: if it breaks a rule of ``check``, or holds a value that MessagePack cannot
            express.
    """
    checks.check(message)
    try:
        data = _ENCODER.encode(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise WireError(_one_line(f"{type(message).__name__}: {error}")) from None
    limit = max_bytes(type(message))
    if len(data) > limit:
        raise TooLarge(f"{type(message).__name__} is {len(data)} bytes, the limit is {limit}")
    if len(data) >= COUNT_FROM_BYTES and has_too_many_items(data):
        raise TooLarge(f"{type(message).__name__} holds more than {max_items(len(data))} values")
    return data


def decode(data: Buffer, *types: type[M]) -> M:
    """Decode one message of one of the given types and check it.

    Raises:
        WireError: if it is too large or not MessagePack, has an unknown field or a wrong type, or
            breaks a rule.
    """
    decoder, limit = _DECODERS.get(types) or _make_decoder(types)
    if len(data) > limit:
        raise WireError(f"message is {len(data)} bytes, the limit is {limit}")
    if len(data) >= COUNT_FROM_BYTES and has_too_many_items(data):
        raise WireError(f"message holds more than {max_items(len(data))} values")
    try:
        message: M = decoder(data)
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        raise WireError(_one_line(f"{'/'.join(t.__name__ for t in types)}: {error}")) from None
    checks.check(message)
    return message


def _make_decoder(types: tuple[type[wire.Message], ...]) -> tuple[Callable[[Buffer], Any], int]:
    union: Any = _Nothing  # a decoder of a single type would accept messages without its name
    for kind in types:
        union = union | kind
    limit = max(map(max_bytes, types))
    _DECODERS[types] = msgspec.msgpack.Decoder(union).decode, limit
    return _DECODERS[types]


def _one_line(text: str) -> str:
    return " ".join(text.split())[:500]
