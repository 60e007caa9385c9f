"""Which rollout server gets a request: pure, from what presence and the hub's own outstanding requests tell."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

SLACK = 0.25  # a conversation leaves a full server only for one that is emptier by this share of its slots


class Server(msgspec.Struct, frozen=True):
    """A server that answers the wanted policy.

    Attributes:
        load: requests in it, waiting or running, as far as known here.
        slots: requests it decodes at once.
    """

    id: str
    address: str
    policy_version: int
    slots: int
    load: int

    @property
    def pressure(self) -> float:
        """Requests per slot; above 1 some wait."""
        return self.load / max(self.slots, 1)


def choose(servers: Sequence[Server], *, min_version: int = 0, sticky: str = "", avoid: frozenset[str] = frozenset()) -> Server | None:
    """The server to ask, or None when there is none at all.

    Servers in ``avoid`` (they just failed) and servers older than ``min_version`` (they would let the request wait) are
    asked only when there are no others. A conversation stays with ``sticky``, which holds its prefix, until that one is
    full and another is clearly emptier; all others go where the pressure is lowest.
    """
    if len(servers) == 1:
        return servers[0]
    able = [server for server in servers if server.id not in avoid] or list(servers)
    able = [server for server in able if server.policy_version >= min_version] or able
    if not able:
        return None
    best = min(able, key=lambda server: (server.pressure, server.id))
    for server in able:
        if server.id == sticky and (server.load < server.slots or server.pressure - best.pressure <= SLACK):
            return server
    return best
