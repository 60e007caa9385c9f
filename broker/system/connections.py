"""Addresses of this host's interfaces: which reaches another host, and whose it is."""

from __future__ import annotations

import ipaddress
import socket
from typing import Final

import psutil

ANY_PORT: Final = 9  # nothing is sent there
FAMILIES: Final = (socket.AF_INET, socket.AF_INET6)


def addresses() -> dict[str, list[str]]:
    """Return the addresses of each interface, IPv4 first, without link-local ones."""
    usable_addresses: dict[str, list[str]] = {}
    for name, entries in psutil.net_if_addrs().items():
        ordered = [
            entry.address for family in FAMILIES for entry in entries if entry.family == family
        ]
        if usable := [address for address in ordered if not address.lower().startswith("fe80:")]:
            usable_addresses[name] = usable
    return usable_addresses


def interface_of(address: str) -> str:
    """Return the name of the interface that has an address, empty if none has it."""
    return next(
        (
            name
            for name, interface_addresses in addresses().items()
            if address in interface_addresses
        ),
        "",
    )


def address_of(interface: str) -> str:
    """Return the first address of an interface.

    Raises:
        ValueError: if there is no such interface, or it has no address; names those that have one.
    """
    interfaces = addresses()
    if interface not in interfaces:
        raise ValueError(
            "expected an interface of this host that has an address: "
            f"{', '.join(sorted(interfaces)) or 'none'}"
        )
    return interfaces[interface][0]


def address_towards(host: str, port: int = ANY_PORT) -> str:
    """Return this host's address on the way to another host; nothing is sent.

    Raises:
        OSError: if the name is unknown or there is no route.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def is_loopback(host: str) -> bool:
    """Return whether a host's name or address is this host's loopback."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
