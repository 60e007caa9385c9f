"""The certificates of a broker that other hosts reach: an authority of its own, and one certificate
per address.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    EllipticCurvePrivateKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

AUTHORITY_DAYS: Final = 3650
SERVER_DAYS: Final = 365
RENEW_DAYS: Final = 180  # before its end, when the server starts


def server_certificate(folder: Path, address: str) -> tuple[Path, Path]:
    """Return the files of certificate and key of the server at an IP address, made or renewed as
    needed.

    Args:
        folder: holds ``ca.pem`` and ``ca.key``, made if missing; its caller keeps others from
            changing it.

    Raises:
        OSError: if a file cannot be used.
        ValueError: if a file holds no certificate or key.
    """
    if not (folder / "ca.pem").exists():
        _make_authority(folder)
    certificate = folder / f"{address.replace(':', '_')}.pem"
    key = certificate.with_suffix(".key")
    if not certificate.exists() or _days_left(certificate) < RENEW_DAYS:
        _make_server(folder, address, certificate, key)
    return certificate, key


def _days_left(file: Path) -> int:
    return (x509.load_pem_x509_certificate(file.read_bytes()).not_valid_after_utc - _utc_now()).days


def _make_authority(folder: Path) -> None:
    key = generate_private_key(SECP256R1())
    name = _common_name("rlearner broker authority")
    limits = x509.BasicConstraints(ca=True, path_length=0)
    builder = _start_certificate(name, name, key, AUTHORITY_DAYS).add_extension(
        limits, critical=True
    )
    _write_private(folder / "ca.key", _encode_key(key))
    _write_private(folder / "ca.pem", _sign_certificate(builder, key))


def _make_server(folder: Path, address: str, certificate: Path, key_file: Path) -> None:
    authority = load_pem_private_key((folder / "ca.key").read_bytes(), None)
    if not isinstance(authority, EllipticCurvePrivateKey):
        raise ValueError(f"{folder / 'ca.key'} holds no elliptic curve key")
    issuer = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes()).subject
    key = generate_private_key(SECP256R1())
    ip = ipaddress.ip_address(address)
    dns_names = [x509.DNSName("localhost")] if ip.is_loopback else []
    names = x509.SubjectAlternativeName([x509.IPAddress(ip), *dns_names])
    limits = x509.BasicConstraints(ca=False, path_length=None)
    issued = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    builder = _start_certificate(
        _common_name(f"rlearner broker {address}"), issuer, key, SERVER_DAYS
    ).add_extension(limits, critical=True)
    builder = builder.add_extension(names, critical=False).add_extension(issued, critical=False)
    _write_private(key_file, _encode_key(key))
    _write_private(certificate, _sign_certificate(builder, authority))


def _start_certificate(
    subject: x509.Name, issuer: x509.Name, key: EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    begin = _utc_now() - datetime.timedelta(days=1)  # clocks of other hosts may be behind
    builder = x509.CertificateBuilder(
        issuer, subject, key.public_key(), x509.random_serial_number()
    )
    builder = builder.not_valid_before(begin).not_valid_after(
        _utc_now() + datetime.timedelta(days=days)
    )
    return builder.add_extension(
        x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
    )


def _sign_certificate(
    builder: x509.CertificateBuilder, authority: EllipticCurvePrivateKey
) -> bytes:
    return builder.sign(authority, hashes.SHA256()).public_bytes(Encoding.PEM)


def _encode_key(key: EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _common_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def _write_private(file: Path, data: bytes) -> None:
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
        opened.write(data)


def _utc_now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
