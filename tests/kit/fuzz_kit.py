"""Inputs that nobody would send: bits flipped, bytes cut, repeated and spliced, lengths that lie,
values of every kind in every place.

All of it follows from a seed.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import msgpack

# What a length or a number may claim to be.
LIES = [
    0,
    1,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0xFFFF,
    2**24,
    2**27,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**63 - 1,
    2**63,
    2**64 - 1,
]
HEADS = [  # of MessagePack: claims of what follows, that is not there
    *(bytes([kind]) + struct.pack(">I", lie & 0xFFFFFFFF) for kind in (0xC6, 0xC9, 0xDB, 0xDD,
        0xDF) for lie in LIES[7:12]),
    *(bytes([kind]) + b"\xff\xff" for kind in (0xC5, 0xC8, 0xDA, 0xDC, 0xDE)),
    b"\xc1", b"\xd9\xff", b"\xc4\xff", b"\xc7\xff\xff",
]  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**32, 2**63 - 1, -(2**63), 2**64 - 1, 0.0, -0.0, 5e-324, 1e308, float("inf"),
    float("nan"),
    "", "a", "a.b", "*", ">", "../..", "\0", "\ud7ff", "ä" * 70, "x" * 5000, "1" * 5000, b"", b"\xff" * 9, [], {},
    [[]], {"": None},
    {"dtype": "<i4", "data": b"abc"}, {"dtype": "<f4", "data": b"\0\0\xc0\x7f" * 3}, [None] * 20, {"type": "Group"},
    ["a", 1],
]  # fmt: skip


def mutations(seeds: Sequence[bytes], rng: random.Random) -> Iterator[bytes]:
    """Without end."""
    ways = (
        _flip,
        _flip,
        _cut,
        _splice,
        _overwrite,
        _insert,
        _repeat,
        _noise,
        _field,
        _field,
        _nested,
    )
    while True:
        yield rng.choice(ways)(rng.choice(seeds), seeds, rng)


def _flip(data: bytes, _: Sequence[bytes], rng: random.Random) -> bytes:
    changed = bytearray(data or b"\0")
    for _n in range(rng.choice((1, 1, 1, 2, 4, 16))):
        bit = rng.randrange(len(changed) * 8)
        changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def _cut(data: bytes, _: Sequence[bytes], rng: random.Random) -> bytes:
    a, b = sorted((rng.randint(0, len(data)), rng.randint(0, len(data))))
    return rng.choice((data[:a], data[a:], data[:a] + data[b:]))


def _splice(data: bytes, seeds: Sequence[bytes], rng: random.Random) -> bytes:
    other = rng.choice(seeds)
    return data[: rng.randint(0, len(data))] + other[rng.randint(0, len(other)) :]


def _lie(rng: random.Random) -> bytes:
    lie = rng.choice(LIES)
    shape = rng.choice(("<I", ">I", "<Q", ">Q", "<H", "B"))
    return (
        rng.choice(HEADS)
        if rng.random() < 0.5
        else struct.pack(shape, lie & (2 ** (8 * struct.calcsize(shape)) - 1))
    )


def _overwrite(data: bytes, _: Sequence[bytes], rng: random.Random) -> bytes:
    put, at = _lie(rng), rng.randint(0, len(data))
    return data[:at] + put + data[at + len(put) :]


def _insert(data: bytes, _: Sequence[bytes], rng: random.Random) -> bytes:
    at = rng.randint(0, len(data))
    return data[:at] + _lie(rng) + data[at:]


def _repeat(data: bytes, _: Sequence[bytes], rng: random.Random) -> bytes:
    a, b = sorted((rng.randint(0, len(data)), rng.randint(0, len(data))))
    return data[:a] + data[a:b] * rng.choice((2, 3, 50)) + data[b:]


def _noise(_: bytes, __: Sequence[bytes], rng: random.Random) -> bytes:
    return rng.randbytes(rng.choice((0, 1, 2, 8, 40, 300)))


def _nested(data: bytes, _: Sequence[bytes], rng: random.Random) -> bytes:
    at, depth = rng.randint(0, len(data)), rng.choice((10, 2000, 20_000))
    return data[:at] + rng.choice((b"\x91", b"\x81\xa1a", b"[", b'{"a":', b"(")) * depth + data[at:]


def _field(data: bytes, _: Sequence[bytes], rng: random.Random) -> bytes:
    """Another value in one place of a message or of a line of JSON; what is neither is flipped."""
    for load, dump in ((msgpack.unpackb, msgpack.packb), (json.loads, _json)):
        try:
            plain = load(data)
        except Exception:  # noqa: BLE001  it is of the other kind
            continue
        if isinstance(plain, dict | list):
            _replace(plain, rng)
            try:
                written: bytes = dump(plain)
            except (ValueError, TypeError, OverflowError, UnicodeError):
                continue
            return written
    return _flip(data, (), rng)


def _json(plain: Any) -> bytes:
    return json.dumps(plain, default=repr).encode()


def _replace(plain: Any, rng: random.Random) -> None:
    """In place, somewhere in a tree of mappings and lists."""
    while True:
        keys = list(plain) if isinstance(plain, dict) else list(range(len(plain)))
        if not keys:
            return
        key = rng.choice(keys)
        inner = plain[key]
        if isinstance(inner, dict | list) and inner and rng.random() < 0.8:
            plain = inner
            continue
        if isinstance(plain, dict) and rng.random() < 0.2:
            plain.pop(key)
            if rng.random() < 0.5:
                plain["another"] = inner
        else:
            plain[key] = rng.choice(VALUES)
        return
