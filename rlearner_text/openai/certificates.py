"""TLS of our HTTP servers: loads a certificate with its key, after checks that name the setting."""

from __future__ import annotations

import datetime
import os
import ssl
import stat
from pathlib import Path
from typing import Final

from cryptography import x509

from broker.errors import ConfigError
from broker.system.private_files import is_open_to_others

_REASONS: Final = {"KEY_VALUES_MISMATCH": "the key belongs to another certificate"}


def server_tls(cert: str, key: str, *, cert_name: str, key_name: str) -> ssl.SSLContext:
    """Return a server's TLS 1.2 or newer from certificate, or chain, and key in PEM.

    Args:
        cert_name: the setting that names the certificate, for errors.
        key_name: the setting that names the key, for errors.

    Raises:
        ConfigError: if a file cannot be read, they do not fit together, the certificate is not
            valid now, or other users can read the key.
    """
    _check_readable(cert, cert_name)
    _check_readable(key, key_name)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # OpenSSL would ask for the password of an encrypted key at the terminal
        context.load_cert_chain(cert, key, password=lambda: "")
    except OSError as error:  # also SSLError
        reason = (
            error.reason or "not in PEM" if isinstance(error, ssl.SSLError) else str(error.strerror)
        )
        raise ConfigError(
            cert_name,
            cert,
            f"a certificate in PEM that fits {key_name} {key!r} ({_REASONS.get(reason, reason)})",
        ) from None
    _check_private(key, key_name)
    _check_valid(cert, cert_name)
    return context


def _check_readable(file: str, name: str) -> None:
    try:
        with open(file, "rb"):
            pass
    except OSError as error:
        raise ConfigError(
            name, file, f"a file in PEM that this process can read ({error.strerror})"
        ) from None


def _check_private(file: str, name: str) -> None:
    """Refuse a key that others can read; a group may read root's, for example Debian's ssl-cert."""
    status = os.stat(file)
    if is_open_to_others(status):
        mode = stat.S_IMODE(status.st_mode)
        raise ConfigError(
            name, file, f"a file that other users cannot read (its mode is {mode:o}; run chmod 600)"
        )


def _check_valid(file: str, name: str) -> None:
    certificate = x509.load_pem_x509_certificates(Path(file).read_bytes())[0]
    now = datetime.datetime.now(datetime.UTC)
    begin = certificate.not_valid_before_utc
    end = certificate.not_valid_after_utc
    if not begin <= now < end:
        problem = (
            f"expired at {end:%Y-%m-%d %H:%M} UTC"
            if end <= now
            else f"begins at {begin:%Y-%m-%d %H:%M} UTC"
        )
        raise ConfigError(
            name,
            file,
            f"a certificate that is valid now (this one {problem}; renew it or set the clock)",
        )
