"""Tracks rollout servers: notices all that join and leave, follows the load of a few."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Collection, Mapping
from typing import Final

from broker.contract import wire
from broker.jetstream.bus import Bus
from broker.runtime.presence import SILENT_AFTER_S, Roster
from envhub.servers.awake_clock import AwakeClock
from envhub.servers.sample import SIZE, ServerSample

TICK_S: Final = 1.0


class ServerRoster:
    """Follows a sample of the servers of each policy, and the learner.

    Args:
        in_use: returns the ids of servers that should stay followed.
        rng: makes the draws.
        size: servers of each policy to follow.

    Attributes:
        clock: stops while all followed servers of the policy that is trained sleep, or the event
            loop stands.
    """

    def __init__(
        self,
        bus: Bus,
        in_use: Callable[[], Collection[str]],
        rng: random.Random,
        *,
        size: int = SIZE,
    ) -> None:
        self._in_use = in_use
        self._rng = rng
        self._size = size
        self._entries_roster = Roster(
            bus, beats=("learner",), members=("rollout",), on_change=self._hear_member
        )
        self._beats_roster = Roster(bus, beats=(), on_change=self._hear_beat)
        self.clock = AwakeClock()
        self._samples: dict[str, ServerSample] = {}  # by policy
        self._policies: dict[str, str] = {}  # of every server that exists
        self._membership_changed = asyncio.Event()  # a server has joined or left
        self._followed_since: dict[str, float] = {}  # followed, on the roster's clock

    async def serve(self) -> None:
        """Follow until cancelled."""
        watching = asyncio.create_task(self.clock.serve())
        await self._entries_roster.start()
        await self._beats_roster.start()
        try:
            while True:
                await self._update()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._membership_changed.wait(), TICK_S)
                self._membership_changed.clear()
        finally:
            watching.cancel()
            await self._beats_roster.close()
            await self._entries_roster.close()

    def alive(self, policy: str) -> list[wire.Presence]:
        """Return the newest presence of each live followed server of a policy, in order of id."""
        return [presence for presence in self.all() if presence.policy == policy]

    def all(self) -> list[wire.Presence]:
        """Return the live followed servers of every policy."""
        return self._beats_roster.alive("rollout")

    def weights(self, policy: str) -> Mapping[str, float]:
        """Return ``ServerSample.weights``; servers without one get no new conversations."""
        if policy not in self._samples:
            return {}
        return self._samples[policy].weights()

    def learners(self) -> list[wire.Presence]:
        """Return the live learner, if there is one."""
        return self._entries_roster.alive("learner")

    async def changed(self, timeout_s: float) -> None:
        """Wait until a followed server joins, leaves or changes, or until the timeout."""
        await self._beats_roster.changed(timeout_s)

    async def _update(self) -> None:
        """Update the samples; the cost depends on the followed servers only."""
        now = asyncio.get_running_loop().time()
        in_use = self._in_use()
        for server, since in self._followed_since.items():
            is_silent = (
                self._beats_roster.get(server) is None
                and self._beats_roster.clock - since > SILENT_AFTER_S
            )
            if is_silent and server in self._policies:
                self._samples[self._policies[server]].silent(server)
        for sample in self._samples.values():
            sample.tick(now, in_use)
        followed = {server for sample in self._samples.values() for server in sample.followed}
        # beats of a few servers only: a hub need not hear thousands
        await self._beats_roster.follow("rollout", followed)
        self._followed_since = {
            server: self._followed_since.get(server, self._beats_roster.clock)
            for server in followed
        }

    def _hear_beat(self, presence: wire.Presence, _: bool) -> None:
        """Stop or start the clock."""
        if presence.role == "rollout" and presence.policy == wire.ACTOR:
            serving = [server for server in self.alive(wire.ACTOR) if server.state == "serving"]
            self.clock.note(bool(serving) and all(server.asleep for server in serving))

    def _hear_member(self, presence: wire.Presence, is_there: bool) -> None:
        """Update the samples when a server has put its entry or is gone."""
        if presence.role != "rollout":
            return
        old_policy = self._policies.pop(presence.id, None)
        if old_policy is not None and (old_policy != presence.policy or not is_there):
            self._samples[old_policy].gone(presence.id)
        if is_there:
            self._policies[presence.id] = presence.policy
            self._samples.setdefault(
                presence.policy, ServerSample(self._rng, size=self._size)
            ).exists(presence.id, presence.speed)
        if old_policy is None or not is_there:
            self._membership_changed.set()
