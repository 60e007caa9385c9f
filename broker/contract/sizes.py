"""Size limits of messages, checked before decoding: bytes and number of values.

Bytes alone do not limit the memory of decoding: an empty list is one byte in MessagePack and over
fifty in Python. The limits bound it to twice the largest message.
"""

from __future__ import annotations

from typing import Final

Buffer = bytes | bytearray | memoryview

MAX_PAYLOAD_BYTES: Final = 8 * 1024 * 1024
MAX_GROUP_BYTES: Final = 1 << 30  # of a group in parts
# of a group in one message; a larger one would block others on a slow link
INLINE_BYTES: Final = 2 << 20
PART_BYTES: Final = 1 << 20
LEAST_PART_BYTES: Final = 64 * 1024
HEADER_BYTES: Final = 512  # room for headers in addition to the largest message
# of messages without columns or bytes: at worst each byte is a list of 72
MAX_SMALL_BYTES: Final = 192 * 1024
# smaller messages need less memory than the limit in any case
COUNT_FROM_BYTES: Final = 1024 * 1024
MAX_ITEMS: Final = 80_000  # values and keys of larger messages, per MAX_PAYLOAD_BYTES begun

_FIXED: Final = {  # first byte: number of bytes that follow
    0xC0: 0, 0xC1: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8,
    0xD0: 1, 0xD1: 2,
    0xD2: 4, 0xD3: 8, 0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17,
}  # fmt: skip
# first byte: bytes of the length that follows
_SIZED: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
# first byte: bytes of the count that follows, values per item
_CONTAINERS: Final = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}


def max_items(num_bytes: int) -> int:
    """Return the most values and keys for a message of this size, which bounds the memory of
    decoding it.
    """
    return max(MAX_ITEMS, MAX_ITEMS * num_bytes // MAX_PAYLOAD_BYTES)


def has_too_many_items(data: Buffer) -> bool:
    """Return whether a large message holds more than ``max_items`` values and keys; truncated ones
    pass.
    """
    if len(data) < COUNT_FROM_BYTES:
        return False
    position = 0
    num_open = 1
    end = len(data)
    for _ in range(max_items(end)):
        if not num_open or position >= end:
            return False
        head = data[position]
        position = position + 1
        num_open = num_open - 1
        if head < 0x80 or head >= 0xE0:
            continue
        if head < 0xA0:
            num_open += (head & 0x0F) * (2 if head < 0x90 else 1)
        elif head < 0xC0:
            position += head & 0x1F
        elif head in _FIXED:
            position += _FIXED[head]
        elif head in _SIZED:
            width = _SIZED[head]
            position += (
                width + int.from_bytes(data[position : position + width]) + (0xC7 <= head <= 0xC9)
            )
        else:
            width, values_per_item = _CONTAINERS[head]
            num_open += values_per_item * int.from_bytes(data[position : position + width])
            position += width
    return num_open > 0
