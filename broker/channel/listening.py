"""Decides at which address of this host a server takes requests from other hosts and users."""

from __future__ import annotations

import logging
from typing import Final
from urllib.parse import urlsplit

from broker.errors import ConfigError
from broker.nats import addresses
from broker.system.connections import address_of, address_towards, is_loopback

LOOPBACK: Final = "127.0.0.1"

log = logging.getLogger(__name__)


def listening_address(
    interface: str | None, bind: str | None, broker_url: str, loopback: str = LOOPBACK
) -> str:
    """Return the given address, the interface's, or this host's address on the way to the broker.

    Args:
        interface: name of an interface.
        bind: IP address, with a port or without; takes precedence.
        loopback: which loopback address to use if the broker is on this host.

    Raises:
        ConfigError: if there is no such interface here, or it has no address.
    """
    if bind is not None:
        return bind
    if interface is not None:
        try:
            return _bracket_ipv6(address_of(interface))
        except ValueError as error:
            raise ConfigError("--interface", interface, str(error)) from None
    host = urlsplit(addresses.split_servers(broker_url)[0]).hostname or LOOPBACK
    try:
        address = address_towards(host)
    # reached by a name that only a proxy knows, or the route has just gone
    except OSError as error:
        log.warning(
            "no route to the broker's %s (%s), so only this host sends requests",
            host,
            error.strerror,
        )
        return _bracket_ipv6(loopback)
    return _bracket_ipv6(loopback if is_loopback(address) else address)


def _bracket_ipv6(address: str) -> str:
    return f"[{address}]" if ":" in address else address
