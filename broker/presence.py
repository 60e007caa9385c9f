"""Who is there. Each process puts its Presence every second; a reader decides by its own monotonic clock who is alive."""

from __future__ import annotations

from collections.abc import Callable

from broker import wire
from broker.jetstream import Bus


class Announcer:
    """Puts ``describe()`` into the presence bucket every second (at once on ``poke``) and deletes it on ``close``."""

    def __init__(self, bus: Bus, describe: Callable[[], wire.Presence], *, every_s: float = 1.0) -> None: ...
    async def start(self) -> None: ...
    def poke(self) -> None: ...
    async def close(self) -> None: ...


class Roster:
    """Keeps the living processes of this run, by role. A process is alive while its revision changes within the TTL."""

    def __init__(self, bus: Bus, *, ttl_s: float = 5.0) -> None: ...
    async def start(self) -> None: ...
    async def close(self) -> None: ...
    def alive(self, role: str) -> list[wire.Presence]:
        """The living, newest presence each, in order of id."""
        raise NotImplementedError

    def get(self, process_id: str) -> wire.Presence | None: ...
    async def changed(self, timeout_s: float) -> None:
        """Returns when anyone came, went or changed, or after the timeout."""
