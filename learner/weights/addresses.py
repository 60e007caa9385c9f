"""Decides at which address of this host servers find the weights."""

from __future__ import annotations

import logging
from typing import Final
from urllib.parse import urlsplit

from broker.errors import ConfigError
from broker.nats import addresses
from broker.system.connections import address_of, address_towards, is_loopback

LOOPBACK: Final = "127.0.0.1"

log = logging.getLogger(__name__)


def weights_address(interface: str | None, broker_url: str, hosts_address: str = "") -> str:
    """Return the address of an interface, or this host's address on the way to the broker.

    Args:
        interface: ``train.weights_interface``.
        hosts_address: taken if the broker is on this host, and the learner's other ranks are not:
            they send, too.

    Raises:
        ConfigError: if there is no such interface here, or it has no address.
    """
    if interface is not None:
        try:
            return address_of(interface)
        except ValueError as error:
            raise ConfigError("train.weights_interface", interface, str(error)) from None
    host = urlsplit(addresses.split_servers(broker_url)[0]).hostname or LOOPBACK
    try:
        address = address_towards(host)
        return hosts_address if hosts_address and is_loopback(address) else address
    # reached by a name that only a proxy knows, or the route has just gone
    except OSError as error:
        log.warning(
            "weights: no route to the broker's %s (%s), so only this host gets weights",
            host,
            error.strerror,
        )
        return LOOPBACK
