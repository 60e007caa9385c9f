"""Frames over a socket or a pipe: a length, four bytes little-endian, and that many bytes.

Imports nothing but ``os``: the sandbox sends this module's code to the processes inside it.
"""

from __future__ import annotations

import os

HEADER_BYTES = 4
# Of a worker's answer. It runs users' code, so a longer frame is refused unread.
MAX_ANSWER_BYTES = 8 << 20
_PIECE_BYTES = 1 << 20  # so that an announced size reserves no memory


class FrameTooLong(ValueError):
    """A frame is longer than its reader takes."""


def pack_frame(data: bytes) -> bytes:
    """Return the bytes with their length in front."""
    return len(data).to_bytes(HEADER_BYTES, "little") + data


def frame_size(header: bytes, max_bytes: int | None = None) -> int:
    """Return the length in a header.

    Raises:
        FrameTooLong: if it exceeds ``max_bytes``.
    """
    size = int.from_bytes(header, "little")
    if max_bytes is not None and size > max_bytes:
        raise FrameTooLong(f"{size} bytes, the limit is {max_bytes}")
    return size


def read_frame(fd: int, max_bytes: int | None = None) -> bytes | None:
    """Wait for a frame and return its content; None once the other end has closed.

    Raises:
        FrameTooLong: if it is longer than ``max_bytes``.
    """
    header = read_exactly(fd, HEADER_BYTES)
    return None if header is None else read_exactly(fd, frame_size(header, max_bytes))


def read_exactly(fd: int, size: int) -> bytes | None:
    """Wait for this many bytes; None if the other end closes before."""
    data = bytearray()
    while len(data) < size:
        try:
            piece = os.read(fd, min(size - len(data), _PIECE_BYTES))
        except OSError:
            return None
        if not piece:
            return None
        data += piece
    return bytes(data)


def write_frame(fd: int, data: bytes) -> bool:
    """Send a frame; return False if the other end has closed."""
    unsent = memoryview(pack_frame(data))
    try:
        while unsent:
            unsent = unsent[os.write(fd, unsent) :]
    except OSError:
        return False
    return True
