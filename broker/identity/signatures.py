"""Signatures of a run's owner on the values that decide what the run's processes do.

A broker's permissions alone do not protect them: JetStream sends its reply to any subject that the
requester names.
"""

from __future__ import annotations

import base64
import binascii
import time
from typing import Final

from broker.contract.sizes import Buffer
from broker.errors import WireError
from broker.identity.keys import Key, verify_signature

HEADER: Final = "Rl-Signature"
MAX_DIGITS: Final = 15


def sign_value(owner: Key, subject: str, data: Buffer, *, above: int = 0) -> dict[str, str]:
    """Return the header that signs a value.

    Args:
        subject: where the value is published; it names the run and the stream.
        above: the stamp of the value that this one replaces.
    """
    stamp = max(int(time.time() * 1000), above + 1)
    signature = owner.sign(_signed_bytes(subject, stamp, data))
    return {HEADER: f"{stamp}.{base64.b64encode(signature).decode()}"}


def verify_stamp(owner: str, subject: str, headers: dict[str, str] | None, data: Buffer) -> int:
    """Return when a value was signed, in milliseconds; later values of a subject have larger ones.

    Args:
        owner: public key of the run's owner.

    Raises:
        WireError: if the owner did not sign this value for this subject.
    """
    number, _, encoded = (headers or {}).get(HEADER, "").partition(".")
    try:
        signature = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        signature = b""
    is_number = number.isascii() and number.isdigit() and len(number) <= MAX_DIGITS
    if not is_number or not verify_signature(
        owner, _signed_bytes(subject, int(number), data), signature
    ):
        raise WireError("the owner of the run did not sign it")
    return int(number)


def _signed_bytes(subject: str, stamp_ms: int, data: Buffer) -> bytes:
    return f"rlearner {subject} {stamp_ms}\n".encode() + bytes(data)
