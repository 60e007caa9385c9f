"""Broker addresses: ``nats://host:port``, or several servers of one cluster separated by commas."""

from __future__ import annotations

import re
import socket
import ssl
import time
from typing import Final
from urllib.parse import urlsplit

from broker.errors import BrokerUnreachable

DEFAULT_BROKER: Final = "nats://127.0.0.1:4222"
INSECURE: Final = "RL_INSECURE"  # environment variable of --insecure
# of OpenSSL's X509_V_ERR
EXPIRED = 10
NOT_YET_VALID = 9
OTHER_NAMES = (62, 64)
CERTIFICATE_ALERTS: Final = tuple(
    f"ALERT_{alert}" for alert in ("BAD_CERTIFICATE", "UNKNOWN_CA", "CERTIFICATE_")
)
SCHEMES: Final = ("nats", "tls", "ws", "wss")


def split_servers(url: str) -> list[str]:
    """Return the URL of each server; later ones without a scheme get that of the first:
    ``nats://a:4222,b:4222``.

    Raises:
        BrokerUnreachable: if one of them is not a valid address.
    """
    first, *later_servers = (server.strip() for server in url.split(","))
    scheme = first.partition("://")[0]
    servers = [
        first,
        *(server if "://" in server else f"{scheme}://{server}" for server in later_servers),
    ]
    for server in servers:
        try:
            parts = urlsplit(server)
            is_valid = parts.scheme in SCHEMES and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_valid = False
        if not is_valid:
            allowed = "expected nats://host:port, or several separated by commas"
            raise BrokerUnreachable(f"{without_passwords(url)} is not a broker address; {allowed}")
    return servers


def without_passwords(url: str) -> str:
    """Return the addresses without user names and passwords."""
    return ",".join(server.rpartition("@")[2] for server in url.split(",")) if "@" in url else url


def without_logins(url: str) -> str:
    """Return the addresses as others may use them, without user names and passwords."""
    return re.sub(r"(^|//|,)[^/,@]*@", r"\1", url)


def why_unreachable(error: Exception) -> str:
    """Describe in plain words why a connection attempt failed."""
    if isinstance(error, ConnectionRefusedError):
        return "connection refused; no program listens there"
    if isinstance(error, socket.gaierror):
        return f"unknown host name ({error.strerror})"
    if isinstance(error, TimeoutError):
        return "the attempt to connect timed out; a firewall may drop its port"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {_why_untrusted(error)}"
    if isinstance(error, ssl.SSLError):
        return f"TLS fails: {error.reason or error}".replace(
            "WRONG_VERSION_NUMBER", "what answers there speaks no TLS"
        )
    if "INFO" in str(error):  # the first message of a NATS server
        return "what answers there is not a NATS server"
    return str(error) or type(error).__name__


def refuses_certificate(error: Exception) -> bool:
    """Return whether a server said that it does not accept the certificate of this end."""
    reason = str(error.reason) if isinstance(error, ssl.SSLError) else ""
    return any(alert in reason for alert in CERTIFICATE_ALERTS)


def _why_untrusted(error: ssl.SSLCertVerificationError) -> str:
    now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    if error.verify_code in (EXPIRED, NOT_YET_VALID):
        problem = "has expired" if error.verify_code == EXPIRED else "is not yet valid"
        return (
            f"it {problem} by the clock of this host ({now}); renew it (restart our broker) or "
            "set the clock"
        )
    if error.verify_code in OTHER_NAMES:
        return f"{error.verify_message}; use the address for which it was made"
    return (
        f"{error.verify_message}; use a join token of this broker, or name its authority in "
        "RL_BROKER_CA"
    )
