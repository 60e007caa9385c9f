"""Addresses of ZeroMQ servers: how they are written in presence, and which end point a client uses.

    tcp://10.0.0.2:41234 key=Z85 host=DIGEST local=NAME

``key`` is the server's public CURVE key. ``host`` tells on which host a loopback address is valid.
``local`` is the name of a socket of ``broker.channel.local_sockets``, which processes of the same
host and user use. Either ``tcp`` with ``key`` or ``local`` may be missing. Nothing else is allowed:
no other scheme, no path, no host name.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from broker.channel import local_sockets
from broker.contract.checks import KEY_CHARS, Z85

MAX_CHARS: Final = 256
TCP: Final = re.compile(r"tcp://(?:\[([0-9a-fA-F:.]{2,45})\]|([0-9.]{7,15})):([1-9][0-9]{0,4})")
DIGEST: Final = re.compile(r"[0-9a-f]{16}")
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class BadAddress(ValueError):
    """The address is not allowed, or leads to another host."""


@dataclass(frozen=True)
class ServerAddress:
    """Where a server takes requests.

    Attributes:
        tcp: ``tcp://IP:PORT``, empty without one.
        key: its public CURVE key in Z85, with ``tcp``.
        host: digest of ``this_host``, with ``tcp``.
        local: name of its local socket, empty without one.
    """

    tcp: str = ""
    key: str = ""
    host: str = ""
    local: str = ""

    def __str__(self) -> str:
        words = (self.tcp, f"key={self.key}", f"host={self.host}") if self.tcp else ()
        return " ".join([*words, f"local={self.local}"] if self.local else words)

    @classmethod
    def parse(cls, text: str) -> ServerAddress:
        """Return an address from its text.

        Raises:
            BadAddress: if it is not written exactly as above, or the IP address is not one of a
                host.
        """
        fields: dict[str, str] = {}
        for word in text.split(" ") if len(text) <= MAX_CHARS else ():
            name, _, value = ("tcp", "", word) if word.startswith("tcp:") else word.partition("=")
            if name in fields:
                raise BadAddress(f"{text[:100]!r} is not a server address: {name} twice")
            fields[name] = value
        tcp, key, host, local = (fields.pop(name, "") for name in ("tcp", "key", "host", "local"))
        is_valid = not fields and bool(tcp or local)
        is_valid = is_valid and (
            not tcp or (_is_unicast(tcp) and _is_key(key) and bool(DIGEST.fullmatch(host)))
        )
        is_valid = is_valid and (not local or bool(local_sockets.NAME.fullmatch(local)))
        if not is_valid or (not tcp and (key or host)):
            allowed = "expected tcp://IP:PORT key=KEY host=DIGEST, local=NAME, or both"
            raise BadAddress(f"{text[:100]!r} is not a server address; {allowed}")
        return cls(tcp, key, host, local)

    def endpoint(self) -> tuple[str, str]:
        """Return the end point to connect to, and the server's key, empty for a local socket.

        Raises:
            BadAddress: if it cannot be reached from here: a local address of another host or user.
        """
        if self.local and (path := local_sockets.find_socket(self.local)):
            return f"ipc://{path}", ""
        if not self.tcp:
            raise BadAddress("it takes requests only from its own host and user")
        if _parse_ip(self.tcp).is_loopback and self.host != this_host():
            raise BadAddress(f"{self.tcp} is a loopback address of another host")
        return self.tcp, self.key


def display_address(address: str) -> str:
    """Return the part of an address that a message to a user shows."""
    return address.partition(" ")[0]


@cache
def this_host() -> str:
    """Return a digest of the boot and the network namespace: the same where loopback addresses mean
    the same.
    """
    try:
        boot = BOOT_ID.read_text(encoding="ascii").strip()
        network = os.readlink("/proc/self/ns/net")
    except OSError:
        boot = os.uname().nodename
        network = ""
    return hashlib.sha256(f"rlearner {boot} {network}".encode()).hexdigest()[:16]


def _parse_ip(tcp: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the IP address of an end point that matches TCP.

    Raises:
        ValueError: if the numbers do not make one.
    """
    match = TCP.fullmatch(tcp)
    if match is None:
        raise ValueError(tcp)
    address = ipaddress.ip_address(match[1] or match[2])
    return getattr(address, "ipv4_mapped", None) or address


def _is_unicast(tcp: str) -> bool:
    try:
        address = _parse_ip(tcp)
    except ValueError:
        return False
    port = int(tcp.rpartition(":")[2])
    return port < 65536 and not (
        address.is_multicast or address.is_unspecified or str(address) == "255.255.255.255"
    )


def _is_key(key: str) -> bool:
    return len(key) == KEY_CHARS and Z85.issuperset(key)
