"""The servers that a hub asks: it hears of all that join and leave, and follows the load of a few."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Collection, Mapping
from typing import Final

from broker.contract import wire
from broker.jetstream.bus import Bus
from broker.runtime.presence import SILENT_AFTER_S, Roster
from envhub.servers.sample import ServerSample

TICK_S: Final = 1.0


class ServerRoster:
    """Follows a sample of the servers of each policy that is served, and the learner.

    Args:
        in_use: ids of servers that must stay followed if they can be.
        rng: makes the draws.
    """

    def __init__(self, bus: Bus, in_use: Callable[[], Collection[str]], rng: random.Random) -> None:
        self._in_use, self._rng = in_use, rng
        self._joined = Roster(bus, beats=("learner",), members=("rollout",), told=self._hear_member)
        self._heard = Roster(bus, beats=())
        self._samples: dict[str, ServerSample] = {}  # by policy
        self._policies: dict[str, str] = {}  # of every server that exists
        self._news = asyncio.Event()  # a server has joined or left
        self._since: dict[str, float] = {}  # followed, on the roster's clock

    async def serve(self) -> None:
        """Follow until cancelled."""
        await self._joined.start()
        await self._heard.start()
        try:
            while True:
                await self._update()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), TICK_S)
                self._news.clear()
        finally:
            await self._heard.close()
            await self._joined.close()

    def alive(self, policy: str) -> list[wire.Presence]:
        """The followed servers of a policy that are heard, newest presence each, in order of id."""
        return [one for one in self.all() if one.policy == policy]

    def all(self) -> list[wire.Presence]:
        """The followed servers of every policy that are heard."""
        return self._heard.alive("rollout")

    def weights(self, policy: str) -> Mapping[str, float]:
        """See ``ServerSample.weights``; a followed server that is absent takes no new conversations."""
        return self._samples[policy].weights() if policy in self._samples else {}

    def learners(self) -> list[wire.Presence]:
        """The living learner, if there is one."""
        return self._joined.alive("learner")

    async def changed(self, timeout_s: float) -> None:
        """Returns when a followed server came, went or changed, or after the timeout."""
        await self._heard.changed(timeout_s)

    async def _update(self) -> None:
        """What does not depend on how many servers there are, but only on how many are followed."""
        now, in_use = asyncio.get_running_loop().time(), self._in_use()
        for server, since in self._since.items():
            if (
                server in self._policies
                and self._heard.get(server) is None
                and self._heard.clock - since > SILENT_AFTER_S
            ):
                self._samples[self._policies[server]].silent(server)
        for sample in self._samples.values():
            sample.tick(now, in_use)
        followed = {server for sample in self._samples.values() for server in sample.followed}
        await self._heard.follow("rollout", followed)
        self._since = {server: self._since.get(server, self._heard.clock) for server in followed}

    def _hear_member(self, presence: wire.Presence, is_there: bool) -> None:
        """Tell the samples of one server that put its entry, or is gone."""
        if presence.role != "rollout":
            return
        before = self._policies.pop(presence.id, None)
        if before is not None and (before != presence.policy or not is_there):
            self._samples[before].gone(presence.id)
        if is_there:
            self._policies[presence.id] = presence.policy
            self._samples.setdefault(presence.policy, ServerSample(self._rng)).exists(presence.id, presence.speed)
        if before is None or not is_there:
            self._news.set()
