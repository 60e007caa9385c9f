"""Chooses a request's rollout server, from presence and the hub's requests in flight. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

# a conversation leaves a full server only for one that is emptier by this share of its slots
SLACK = 0.25


class ServerLoad(msgspec.Struct, frozen=True):
    """A server of the requested policy.

    Attributes:
        load: requests in it, waiting or running, as far as known here.
        slots: requests it decodes at once.
        speed: tokens per second when busy; only ratios between servers count.
        weight: how often it is one of the two that are compared; only ratios count. 0: only if
            there is no other.
        shares_prefixes: whether its engine reuses the KV of a prompt for other conversations.
        work: the load in requests of typical length, by their predicted lengths; negative: unknown.
    """

    id: str
    address: str
    policy_version: int
    slots: int
    load: int
    speed: float = 1.0
    weight: float = 1.0
    work: float = -1.0
    shares_prefixes: bool = False

    @property
    def pressure(self) -> float:
        """Requests per slot; above 1 some wait."""
        return self.load / max(self.slots, 1)

    @property
    def rank(self) -> tuple[bool, float]:
        """Sort key for one more request: a free slot first, then the least work for the speed."""
        work = self.work if self.work >= 0 else self.load
        return self.load >= self.slots, (work + 1) / self.speed


def choose(
    servers: Sequence[ServerLoad],
    rng: random.Random,
    *,
    min_version: int = 0,
    sticky: str = "",
    near: str = "",
    avoid: frozenset[str] = frozenset(),
) -> ServerLoad | None:
    """Return the server to send a request to, None if there is none.

    Servers in ``avoid`` (they just failed) and servers older than ``min_version`` (the request
    would wait there) get it only if there are no others. A conversation stays with ``sticky``,
    which holds its prefix, until that one is full and another is clearly emptier. A conversation
    with the same prompt as one that ``near`` got goes there, too, while that has a free slot and
    shares prefixes. All others go to the better of two random servers: loads are a second old, so
    if every hub took the least loaded of all, they would all take the same one.
    """
    if len(servers) == 1:
        return servers[0]
    candidates = [server for server in servers if server.id not in avoid] or list(servers)
    candidates = [
        server for server in candidates if server.policy_version >= min_version
    ] or candidates
    if not candidates:
        return None
    for server in candidates:
        if server.id == near and server.shares_prefixes and server.load < server.slots:
            return server
    best = min(_draw_pair(candidates, rng), key=lambda server: server.rank)
    for server in candidates:
        if server.id == sticky and (
            server.load < server.slots or server.pressure - best.pressure <= SLACK
        ):
            return server
    return best


def _draw_pair(servers: Sequence[ServerLoad], rng: random.Random) -> list[ServerLoad]:
    """Draw two different servers by weight, or the only one."""
    first = _draw_server(servers, rng)
    candidates = [server for server in servers if server is not first and server.weight > 0]
    if not candidates:
        return [first]
    return [first, _draw_server(candidates, rng)]


def _draw_server(servers: Sequence[ServerLoad], rng: random.Random) -> ServerLoad:
    weights = [server.weight for server in servers]
    return rng.choices(servers, weights if any(weights) else None)[0]
