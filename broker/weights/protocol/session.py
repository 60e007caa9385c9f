"""How transfers are named, and the settings of either end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from broker.contract.wire import Carrier
from broker.errors import WireError

PLAN_KEY: Final = "plan"  # the store's key for the plan's text, for servers with another model
# a server waits this long for the response to its join, then asks again
JOIN_TIMEOUT_S: Final = 5.0
MAX_DIGITS: Final = 18  # of a number, to fit into 64 bits


@dataclass(frozen=True)
class TransferSettings:
    """Timeouts, interface and carrier of transfers.

    Attributes:
        carriers: that the sender offers, best first; see ``broker.weights.carriers``.
    """

    carriers: tuple[Carrier, ...] = ("gloo",)
    host: str = "127.0.0.1"  # address of this end's interface, on which the sender listens
    port: int = 0  # that the sender listens on; 0 takes any free one
    timeout_s: float = 30.0  # time limit for one bucket
    connect_timeout_s: float = 5.0  # time limit for a peer to connect


def session_name(epoch: int, serial: int, uses: int) -> str:
    """Return the id of a transfer: the communicator's name and the number of its earlier transfers."""
    return f"{epoch}-{serial}.{uses}"


def session_before(session: str) -> str | None:
    """Return the session of a communicator's previous transfer, None for its first."""
    name, uses = parse_session(session)
    return f"{name}.{uses - 1}" if uses else None


def parse_session(session: str) -> tuple[str, int]:
    """Return a communicator's name and the number of its earlier transfers.

    Raises:
        WireError: if it is not a session id.
    """
    name, _, uses = session.rpartition(".")
    if not name or not (uses.isascii() and uses.isdigit() and len(uses) <= MAX_DIGITS):
        raise WireError(f"session {session[:80]!r}: expected a communicator and a number of uses")
    return name, int(uses)
