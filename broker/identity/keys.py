"""Ed25519 keys in the encoding of NATS (nkeys): a seed that is kept secret and a public key that
names it.
"""

from __future__ import annotations

import base64
import binascii
import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import nkeys
from nacl.exceptions import CryptoError
from nacl.signing import VerifyKey

from broker.errors import UserError
from broker.system.private_files import is_open_to_others


@dataclass(frozen=True)
class Key:
    """A key pair.

    Attributes:
        seed: the secret half, as nkeys text; never shown.
    """

    seed: str = field(repr=False)

    @classmethod
    def generate(cls) -> Key:
        """Return a new key."""
        return cls(bytes(nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)).decode())

    @classmethod
    def parse(cls, text: str, source: str) -> Key:
        """Return the key of a seed.

        Raises:
            UserError: if it is not the seed of a user; names where it came from and does not repeat
                it.
        """
        key = cls(text.strip())
        try:
            if not key.public.startswith("U"):
                raise ValueError
        except (nkeys.NkeysError, ValueError, IndexError):
            raise UserError(
                f"{source} holds no key; expected the seed of a NATS user (it begins with SU)"
            ) from None
        return key

    @classmethod
    def load(cls, path: Path) -> Key:
        """Return the key in a file that only its owner can read.

        Raises:
            UserError: if it cannot be read, other users can read it, or it holds no key.
        """
        try:
            with path.open(encoding="ascii", errors="replace") as file:
                if is_open_to_others(os.fstat(file.fileno())):
                    raise UserError(f"{path} can be read by other users; run chmod 600 {path}")
                return cls.parse(file.read(4096), str(path))
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}") from None

    @cached_property
    def public(self) -> str:
        """The public key, 56 characters that begin with U."""
        return bytes(nkeys.from_seed(bytearray(self.seed.encode())).public_key).decode()

    def sign(self, data: bytes) -> bytes:
        """Return the signature of some bytes, 64 bytes."""
        return bytes(nkeys.from_seed(bytearray(self.seed.encode())).sign(data))

    def sign_nonce(self, nonce: str) -> bytes:
        """Return the signature of a server's nonce as NATS clients send it."""
        return base64.b64encode(self.sign(nonce.encode()))


def verify_signature(public_key: str, data: bytes, signature: bytes) -> bool:
    """Return whether a signature of some bytes was made by the owner of a public key."""
    try:
        raw = base64.b32decode(public_key)  # a prefix, 32 bytes, and a checksum
        VerifyKey(raw[1:-2]).verify(data, signature)
    except (binascii.Error, CryptoError, ValueError):
        return False
    return True
