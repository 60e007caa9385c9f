"""Decides which servers a hub follows: a rotating sample, drawn in proportion to speed. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from broker.channel.endpoint import RequestLimits

# servers that new conversations choose from, if their requests fit into so few
SIZE: Final = 8
# times as many are followed at once, including those that conversations still use
MOST: Final = 2
TOKEN_BYTES: Final = 4  # in a request
REQUEST_BYTES: Final = 1024  # of a request but its context
# between two exchanges; each costs the conversations that return later their prefix cache
ROTATE_S: Final = 20.0


def sample_size(episodes: int, max_context_tokens: int) -> int:
    """Return how many servers a hub has to follow to have room for all its episodes.

    Half of what a server takes from one hub may be in use: requests are spread at random.
    """
    limits = RequestLimits()
    num_bytes = episodes * (TOKEN_BYTES * max_context_tokens + REQUEST_BYTES)
    return max(
        SIZE,
        math.ceil(2 * num_bytes / limits.bytes_of_client),
        math.ceil(2 * episodes / limits.count_of_client),
    )


class ServerSample:
    """The followed servers of one policy.

    New requests go to ``drawn``. A server that is exchanged while conversations use it stays
    followed until they end; once ``most`` are followed, none is exchanged.

    Args:
        rng: makes every draw.

    Attributes:
        drawn: followed, oldest first.
        kept: followed while they are in use.
    """

    def __init__(
        self, rng: random.Random, *, size: int = SIZE, most: int = 0, rotate_s: float = ROTATE_S
    ) -> None:
        self._rng = rng
        self._size = size
        self._most = most or MOST * size
        self._rotate_s = rotate_s
        self._speeds: dict[str, float] = {}  # of every server that exists; 0 unknown
        self._silent: set[str] = set()
        self._new: set[str] = set()  # since the last tick
        self._rotate_at: float | None = None
        self._weights: dict[str, float] | None = None  # until anything changes
        self.drawn: list[str] = []
        self.kept: set[str] = set()

    @property
    def followed(self) -> set[str]:
        """Ids of all followed servers."""
        return self.kept.union(self.drawn)

    def exists(self, server: str, speed: float) -> None:
        """Add a server, or update its speed (tokens/s, 0 unknown)."""
        if server not in self._speeds or server in self._silent:
            self._new.add(server)
        elif self._speeds[server] == speed:
            return
        self._speeds[server] = speed
        self._silent.discard(server)
        self._weights = None

    def gone(self, server: str) -> None:
        """Remove a server."""
        self._speeds.pop(server, None)
        self._silent.discard(server)
        self._new.discard(server)
        self._leave(server)

    def silent(self, server: str) -> None:
        """Note that a followed server sends nothing; it is not drawn until the next ``exists``."""
        if server in self._speeds:
            self._silent.add(server)
            self._leave(server)

    def tick(self, now: float, in_use: Collection[str]) -> None:
        """Fill the sample, release unused servers, and exchange a server if it is time.

        A new server enters a full sample as often as if the sample were drawn now, so it gets its
        share at once.

        Args:
            now: seconds on a monotonic clock.
            in_use: servers with requests in flight, or with conversations that may return soon.
        """
        self.kept.intersection_update(in_use)
        is_full = len(self.drawn) >= self._size
        while len(self.drawn) < self._size and (candidates := self._others()):
            self._draw(self._pick(candidates))
        shares = self._shares() if is_full and self._new else {}
        # sorted, so that the draws depend on the generator alone
        for server in sorted(self._new & shares.keys() - set(self.drawn)):
            if self._rng.random() < shares[server]:
                self._exchange(self._rng.choice(self.drawn), server, in_use)
        self._new.clear()
        if self._rotate_at is None or now >= self._rotate_at:
            if self._rotate_at is not None and (candidates := self._others()):
                self._exchange(self.drawn[0], self._pick(candidates), in_use)
            # at random, so that hubs do not exchange servers in step
            self._rotate_at = now + self._rotate_s * self._rng.uniform(0.5, 1.5)

    def speeds(self) -> dict[str, float]:
        """Return tokens/s of each server that is not silent; the mean if a speed is unknown."""
        living = {
            server: speed for server, speed in self._speeds.items() if server not in self._silent
        }
        positive = [speed for speed in living.values() if speed > 0]
        mean = sum(positive) / len(positive) if positive else 1.0
        return {server: speed if speed > 0 else mean for server, speed in living.items()}

    def weights(self) -> Mapping[str, float]:
        """Return how often to choose each drawn server: over all hubs, in proportion to speed.

        A server in few samples must be chosen more often there: speed divided by the share of
        samples it is in.
        """
        if self._weights is None:
            shares = self._shares()
            speeds = self.speeds()
            self._weights = {server: speeds[server] / shares[server] for server in self.drawn}
        return self._weights

    def _shares(self) -> dict[str, float]:
        """Return each server's probability of being in a sample."""
        speeds = self.speeds()
        return dict(zip(speeds, inclusion(list(speeds.values()), self._size), strict=True))

    def _others(self) -> list[str]:
        return [
            server
            for server in self._speeds
            if server not in self._silent and server not in self.drawn
        ]

    def _pick(self, servers: Sequence[str]) -> str:
        speeds = self.speeds()
        return self._rng.choices(servers, [speeds[server] for server in servers])[0]

    def _draw(self, server: str) -> None:
        self.kept.discard(server)
        self.drawn.append(server)
        self._weights = None

    def _exchange(self, old: str, new: str, in_use: Collection[str]) -> None:
        if old in in_use:
            if len(self.kept) >= self._most - self._size:
                return
            self.kept.add(old)
        self.drawn.remove(old)
        self._draw(new)

    def _leave(self, server: str) -> None:
        self.kept.discard(server)
        self._weights = None
        if server in self.drawn:
            self.drawn.remove(server)


def inclusion(speeds: Sequence[float], size: int) -> list[float]:
    """Return each server's probability of being drawn among ``size``.

    It is in proportion to speed, which is above 0, and at most 1.
    """
    if len(speeds) <= size:
        return [1.0] * len(speeds)
    remaining = sum(speeds)
    room = float(size)
    scale = room / remaining
    # servers that are always drawn leave less room for the others
    for speed in sorted(speeds, reverse=True):
        if speed * scale < 1:
            break
        remaining = remaining - speed
        room = room - 1
        scale = room / remaining if remaining > 0 else 0.0
    return [min(1.0, speed * scale) for speed in speeds]
