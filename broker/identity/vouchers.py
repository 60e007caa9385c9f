"""Vouchers: proof that a process of one role in a run made a statement, checked with the public key
of the run's owner.

    SIGNATURE                               of the owner, for processes of the owner's user
    PUBLIC.EXPIRES.CERTIFICATE.SIGNATURE    of a join token's key, certified for one role

EXPIRES is when the token was to expire. The broker alone decides that, by refusing the key: a token
can be renewed there while its processes work, on hosts that nobody has to visit.
"""

from __future__ import annotations

import base64
import binascii
from typing import Final

from broker.errors import WireError
from broker.identity.keys import Key, verify_signature

MAX_DIGITS: Final = 12


def certify_key(owner: Key, run: str, role: str, public_key: str, expires_at: float) -> str:
    """Return a certificate: the owner of a run says that a key belongs to a process of a role.

    Args:
        expires_at: seconds since the epoch, 0: never.
    """
    expires = str(int(expires_at))
    signature = owner.sign(_certificate_bytes(run, role, public_key, expires))
    return f"{public_key}.{expires}.{_encode_base64(signature)}"


def make_voucher(key: Key, statement: bytes, certificate: str = "") -> str:
    """Return a voucher for a statement.

    Args:
        key: of the owner, or that of the certificate.
    """
    signature = _encode_base64(key.sign(_statement_bytes(statement)))
    return f"{certificate}.{signature}" if certificate else signature


def check_voucher(owner: str, run: str, role: str, statement: bytes, voucher: str) -> None:
    """Check that a process of a role made a statement.

    Args:
        owner: public key of the run's owner.

    Raises:
        WireError: if the voucher does not prove it.
    """
    *certificate, signature = voucher.split(".")
    signer = owner
    if certificate:
        signer = _certified_key(owner, run, role, certificate)
    if not verify_signature(signer, _statement_bytes(statement), _decode_base64(signature)):
        raise WireError("it has no valid voucher")


def signer_of(voucher: str) -> str:
    """Return the public key of the join token that made a voucher; empty for processes of the
    owner's user.
    """
    key, _, remainder = voucher.partition(".")
    return key if remainder else ""


def _certified_key(owner: str, run: str, role: str, certificate: list[str]) -> str:
    try:
        public_key, expires, signature = certificate
    except ValueError:
        raise WireError("its voucher is malformed") from None
    is_number = expires.isascii() and expires.isdigit() and len(expires) <= MAX_DIGITS
    if not is_number or not verify_signature(
        owner, _certificate_bytes(run, role, public_key, expires), _decode_base64(signature)
    ):
        raise WireError(f"the owner of the run did not certify its key for the role {role}")
    return public_key


def _certificate_bytes(run: str, role: str, public_key: str, expires: str) -> bytes:
    return f"rlearner certificate {run} {role} {public_key} {expires}".encode()


def _statement_bytes(statement: bytes) -> bytes:
    return b"rlearner statement\n" + statement


def _encode_base64(signature: bytes) -> str:
    return base64.b64encode(signature).decode()


def _decode_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""
