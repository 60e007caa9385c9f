"""Measure how evenly hubs spread requests over servers: the real sampling and choice in virtual
time.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

from envhub.servers.choose import ServerLoad, choose
from envhub.servers.sample import ServerSample

ROWS: Final = ((20, 200), (100, 1000))  # servers, hubs
SPEEDS: Final = {"equal": (1.0,), "1:2:4": (1.0, 2.0, 4.0)}
SLOTS: Final = 64
TOKENS_PER_S: Final = 3200.0  # of a server of speed 1 whose slots are full
TOKENS: Final = (200, 800)  # of one request, uniform
# requests of all hubs together, as a multiple of all slots; at 1 a slot is free for each that waits
# elsewhere
IN_FLIGHT: Final = 1.0
PRESENCE_S: Final = 1.0
TICK_S: Final = 0.5
MEMBERS_S: Final = 20.0  # between two entries of a server among the members
WARM_UP_S: Final = 60.0
WINDOW_S: Final = 60.0


def measure() -> dict[str, Any]:
    """Return rows of (servers, hubs, speeds, spread); spread: tokens generated divided by those of
    full servers.
    """
    return {"spreads": [row(servers, hubs, speeds) for servers, hubs in ROWS for speeds in SPEEDS]}


def row(servers: int, hubs: int, speeds: str, seed: int = 1) -> dict[str, Any]:
    fleet = SimulatedFleet(servers, hubs, SPEEDS[speeds], seed)
    fleet.run(WARM_UP_S)
    before = sum(server.tokens for server in fleet.servers)
    fleet.run(WARM_UP_S + WINDOW_S)
    served = sum(server.tokens for server in fleet.servers) - before
    ideal = WINDOW_S * TOKENS_PER_S * sum(server.speed for server in fleet.servers)
    return {"servers": servers, "hubs": hubs, "speeds": speeds, "spread": round(served / ideal, 4)}


@dataclass
class SimServer:
    """Generates for at most SLOTS requests at once, each at the same rate; the rest wait in line."""

    id: str
    speed: float
    running: int = 0
    waiting: deque[tuple[int, int]] = field(default_factory=deque)  # (hub, tokens)
    tokens: float = 0.0  # of the requests that are done
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=60))
    # hubs that had requests in it when its last presence came, or asked since
    askers: set[int] = field(default_factory=set)
    shown: tuple[int, float] = (0, 0.0)  # (requests in it, speed) as its last presence said


@dataclass
class SimulatedHub:
    """One hub: what it follows, and what it has outstanding."""

    sample: ServerSample
    rng: random.Random
    outstanding: dict[str, int] = field(default_factory=dict)
    # our requests in a server when its presence came
    seen: dict[str, int] = field(default_factory=dict)


class SimulatedFleet:
    """Events in order of virtual time: (time, number, what happens)."""

    def __init__(self, servers: int, hubs: int, speeds: tuple[float, ...], seed: int) -> None:
        self.rng = random.Random(seed)
        self.servers = [
            SimServer(f"s{number:03}", speeds[number % len(speeds)]) for number in range(servers)
        ]
        self.by_id = {server.id: server for server in self.servers}
        self.hubs = [
            SimulatedHub(
                ServerSample(random.Random(f"{seed}.{number}")), random.Random(f"{seed}/{number}")
            )
            for number in range(hubs)
        ]
        self.now = 0.0
        self._number = 0
        self._events: list[tuple[float, int, str, int, Any]] = []
        for hub in self.hubs:
            for server in self.servers:
                hub.sample.exists(server.id, 0.0)
        for number in range(servers):
            self._at(self.rng.uniform(0, PRESENCE_S), "presence", number)
        for number in range(hubs):
            self._at(0.0, "tick", number)
        for number in range(int(IN_FLIGHT * SLOTS * servers)):
            self._at(self.rng.uniform(0.0, 5.0), "ask", number % hubs)

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, what, number, more = heapq.heappop(self._events)
            getattr(self, f"_{what}")(number, more)

    def _at(self, when: float, what: str, number: int, more: Any = None) -> None:
        self._number += 1
        heapq.heappush(self._events, (when, self._number, what, number, more))

    def _presence(self, number: int, more: Any) -> None:
        """Publish the load of a server, and as its speed its recent maximum."""
        server = self.servers[number]
        server.rates.append(TOKENS_PER_S * server.speed * server.running / SLOTS)
        server.shown = (server.running + len(server.waiting), max(server.rates))
        for asker in server.askers:
            hub = self.hubs[asker]
            hub.seen[server.id] = hub.outstanding[server.id]
        server.askers = {
            asker for asker in server.askers if self.hubs[asker].outstanding[server.id]
        }
        self._at(self.now + PRESENCE_S, "presence", number)

    def _tick(self, number: int, more: Any) -> None:
        """Let a hub read the speeds of the members and its sample."""
        sample = self.hubs[number].sample
        for server in self.servers:
            sample.exists(server.id, server.shown[1])
        sample.tick(
            self.now, {server for server, count in self.hubs[number].outstanding.items() if count}
        )
        self._at(self.now + (TICK_S if self.now < 5 else MEMBERS_S), "tick", number)

    def _ask(self, number: int, more: Any) -> None:
        hub = self.hubs[number]
        weights = hub.sample.weights()
        followed = [self.by_id[server] for server in hub.sample.drawn]
        known = [server.shown[1] for server in followed if server.shown[1] > 0]
        mean = sum(known) / len(known) if known else 1.0
        chosen = choose(
            [
                ServerLoad(
                    server.id,
                    server.id,
                    0,
                    SLOTS,
                    self._load(hub, server),
                    server.shown[1] or mean,
                    weights[server.id],
                )
                for server in followed
            ],
            hub.rng,
        )
        assert chosen is not None
        server = self.by_id[chosen.id]
        hub.outstanding[server.id] = hub.outstanding.get(server.id, 0) + 1
        server.askers.add(number)
        tokens = self.rng.randint(*TOKENS)
        if server.running < SLOTS:
            self._begin(server, number, tokens)
        else:
            server.waiting.append((number, tokens))

    def _load(self, hub: SimulatedHub, server: SimServer) -> int:
        """Estimate the load as ``envhub.servers.generate.TurnGenerator`` does."""
        ours = hub.outstanding.get(server.id, 0)
        return max(ours, server.shown[0] + ours - hub.seen.get(server.id, 0))

    def _begin(self, server: SimServer, hub: int, tokens: int) -> None:
        server.running += 1
        seconds = tokens / (TOKENS_PER_S * server.speed / SLOTS)
        self._at(self.now + seconds, "done", hub, (server, tokens))

    def _done(self, number: int, more: tuple[SimServer, int]) -> None:
        server, tokens = more
        server.running -= 1
        server.tokens += tokens
        self.hubs[number].outstanding[server.id] -= 1
        if server.waiting:
            self._begin(server, *server.waiting.popleft())
        self._ask(number, None)
