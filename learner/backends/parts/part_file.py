"""Names and verifies the files of a checkpoint. Imports no torch."""

from __future__ import annotations

import hashlib
import os
from typing import Final

import msgspec

from broker.errors import UserError

# Bytes written, hashed or read at once, which is all that such work holds in memory.
CHUNK: Final = 8 << 20


class DamagedFileError(UserError):
    """A file of a checkpoint is missing or not what was written."""


class PartFile(msgspec.Struct, frozen=True):
    """One rank's file of a checkpoint."""

    path: str
    size: int = -1  # bytes; -1 if unknown
    digest: str = ""  # blake2b-128, hexadecimal; empty if unknown

    def check_size(self) -> None:
        """Raise DamagedFileError if the file is missing or has another size."""
        try:
            size = os.stat(self.path).st_size
        except OSError as error:
            raise DamagedFileError(f"{self.path} cannot be read: {error.strerror}") from None
        if self.size not in (-1, size):
            raise DamagedFileError(f"{self.path} is damaged: {size} bytes instead of {self.size}")

    def verify(self) -> None:
        """Raise DamagedFileError unless the file has the bytes that were written."""
        self.check_size()
        if not self.digest:
            return
        hasher = new_hash()
        try:
            with open(self.path, "rb", buffering=0) as file:
                while piece := file.read(CHUNK):
                    hasher.update(piece)
        except OSError as error:
            raise DamagedFileError(f"{self.path} cannot be read: {error.strerror}") from None
        if hasher.hexdigest() != self.digest:
            raise DamagedFileError(
                f"{self.path} is damaged: its digest is not that of the bytes written"
            )


def part_name(rank: int, size: int) -> str:
    """Return the name of a rank's file."""
    return f"part-{rank + 1:05d}-of-{size:05d}.safetensors"


def new_hash() -> hashlib.blake2b:
    """Return the hash of a part."""
    return hashlib.blake2b(digest_size=16)
