"""Simulated environment and reward hubs on a ``MemoryBus``, in virtual time; any of them may
freeze.

The decisions of an environment hub are those of its real state machine. Episodes and scores only
take time.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from bench.scale.virtual import MemoryBus
from broker.contract import wire
from broker.contract.streams import (
    ACK_WAIT_S,
    EPISODES,
    EVALTICKETS,
    MEMBERS,
    SAMPLES,
    TICKETS,
    Stream,
)
from broker.jetstream.ticket_results import result_log, ticket_key
from envhub.scheduling import slots
from envhub.scheduling.line import GroupJob

AnyTicket = wire.Ticket | wire.EvalTicket

LOOK_S: Final = 15.0
# groups that the fleet plays at once: a little slower than the learner, so that tickets queue for
# an hour
HUBS = 3
SLOTS = 5
GROUP_S: Final = (60.0, 540.0)
DEADLINE_S: Final = 600.0
SCORERS: Final = 4  # groups that a reward hub scores at once
SCORE_S: Final = 60.0


@dataclass
class _Freeze:
    """When a process does not run."""

    began: float = -1.0
    until: float = -1.0

    def covers(self, now: float) -> bool:
        return self.began <= now < self.until

    def is_lapsed(self, now: float) -> bool:
        """Return whether its marks have lapsed."""
        return self.covers(now) and now - self.began > ACK_WAIT_S

    def is_forgotten(self, now: float) -> bool:
        """Return whether its entry among the members has expired."""
        return self.covers(now) and now - self.began > MEMBERS.ttl_s


@dataclass
class SoakHub:
    """One environment hub.

    Attributes:
        clock_s: its seconds, without those in which it was frozen or paused.
        tickets: in hand, by key.
        left_s: what the episode of each group still takes.
        lapsed: keys of tickets that other hubs may hold by now, as it notices when it runs again.
    """

    name: str
    slots: slots.EpisodeSlots
    clock_s: float = 0.0
    tickets: dict[str, AnyTicket] = field(default_factory=dict)
    left_s: dict[str, float] = field(default_factory=dict)
    lapsed: list[str] = field(default_factory=list)
    freeze: _Freeze = field(default_factory=_Freeze)
    presence: wire.Presence | None = None


class SoakFleet:
    """Environment hubs that take tickets while they are there and the run is not paused.

    Args:
        pools: reward pools that groups visit; without one they go to the log.
    """

    def __init__(self, bus: MemoryBus, domains: set[str], pools: Sequence[str] = ()) -> None:
        self.bus = bus
        self.domains = domains
        self.pools = list(pools)
        self.is_there = True
        self.paused = False
        self.version = 0
        self.num_played = self.num_pauses = 0
        self.rewards: SoakRewards | None = None
        self._random = random.Random(0)
        self._hubs = [
            SoakHub(f"hub-{number}", slots.EpisodeSlots(SLOTS, max_retries=0))
            for number in range(HUBS)
        ]
        self._delivered: Counter[str] = Counter()

    def alive(self, role: str) -> list[wire.Presence]:
        """Return the entries of the hubs that are members, as ``broker.runtime.presence.Roster``
        does.
        """
        if role == "rewardhub":
            return self.rewards.alive() if self.rewards is not None else []
        if role != "envhub" or not self.is_there:
            return []
        now = asyncio.get_running_loop().time()
        return [
            hub.presence
            for hub in self._hubs
            if hub.presence is not None and not hub.freeze.is_forgotten(now)
        ]

    def leave(self) -> None:
        """Kill every hub: tickets in progress return to their queue."""
        self.is_there = False
        for hub in self._hubs:
            self._return_tickets(hub, hub.tickets)
            hub.slots.abandon(list(hub.tickets))
            hub.tickets.clear()
            hub.left_s.clear()
            hub.presence = None

    def freeze(self, number: int, seconds: float) -> None:
        """Stop one hub for some time."""
        now = asyncio.get_running_loop().time()
        if self.is_there and not self._hubs[number % HUBS].freeze.covers(now):
            self._hubs[number % HUBS].freeze = _Freeze(now, now + seconds)
            self.num_pauses += 1

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(LOOK_S)
            for hub in self._hubs:
                if self.is_there and hub.freeze.covers(loop.time()):
                    if hub.freeze.is_lapsed(loop.time()) and not hub.lapsed:
                        hub.lapsed = list(hub.tickets)
                        self._return_tickets(hub, hub.lapsed)
                elif self.is_there:
                    if not self.paused:
                        await self._turn(hub)
                    numbers = [
                        one.number for one in hub.tickets.values() if isinstance(one, wire.Ticket)
                    ]
                    hub.presence = _presence("envhub", hub.name, sorted(self.domains), numbers)

    async def _turn(self, hub: SoakHub) -> None:
        """Do what an environment hub does in one turn; during a pause the servers are away and its
        clock stands.
        """
        await self._perform(
            hub, hub.slots.abandon([key for key in hub.lapsed if key in hub.tickets])
        )
        hub.lapsed = []
        hub.clock_s += LOOK_S
        for key in list(hub.left_s):
            hub.left_s[key] -= LOOK_S
            if hub.left_s[key] <= 0:
                await self._perform(hub, hub.slots.finished(key, 0))
        await self._perform(hub, hub.slots.tick(hub.clock_s))
        for stream in (EVALTICKETS, TICKETS):
            for domain in sorted(self.domains):
                while hub.slots.free > 0 and (ticket := self.bus.take(stream, domain)) is not None:
                    assert isinstance(ticket, AnyTicket)
                    await self._accept(hub, ticket)

    async def _accept(self, hub: SoakHub, ticket: AnyTicket) -> None:
        key = ticket_key(ticket.number, evaluation=isinstance(ticket, wire.EvalTicket))
        self._delivered[key] += 1
        hub.tickets[key] = ticket
        job = GroupJob(key, 1, 1, DEADLINE_S, num_delivered=self._delivered[key])
        await self._perform(hub, hub.slots.offer(job, hub.clock_s))

    async def _perform(self, hub: SoakHub, actions: list[slots.Action]) -> None:
        for action in actions:
            if isinstance(action, slots.StartEpisode):
                hub.left_s[action.key] = self._random.uniform(*GROUP_S)
            elif isinstance(action, slots.AbandonTicket | slots.FinishGroup | slots.CloseTicket):
                ticket = hub.tickets.pop(action.key)
                hub.left_s.pop(action.key, None)
                if isinstance(action, slots.FinishGroup):
                    await self._publish(ticket)
                elif isinstance(action, slots.CloseTicket):
                    eval_step = ticket.eval_step if isinstance(ticket, wire.EvalTicket) else -1
                    closed = wire.Closed(
                        ticket=ticket.number, domain=ticket.domain, reason=action.reason, detail=action.detail,
                        by=hub.name, eval_step=eval_step,
                    )  # fmt: skip
                    await self.bus.publish(
                        result_log(evaluation=eval_step >= 0), closed, ticket=ticket.number
                    )

    async def _publish(self, ticket: AnyTicket) -> None:
        is_eval = isinstance(ticket, wire.EvalTicket)
        self.num_played += not is_eval
        group = _group(ticket, self.version, [] if is_eval else self.pools)
        if group.pools:
            await self.bus.publish(EPISODES, group, key=group.pools[0], ticket=ticket.number)
        else:
            await self.bus.publish(result_log(evaluation=is_eval), group, ticket=ticket.number)

    def _return_tickets(self, hub: SoakHub, keys: Sequence[str] | dict[str, AnyTicket]) -> None:
        for key in keys:
            ticket = hub.tickets[key]
            stream: Stream = EVALTICKETS if isinstance(ticket, wire.EvalTicket) else TICKETS
            self.bus.give_back(stream, ticket.domain, ticket)


class SoakRewards:
    """Reward hubs as one: score the groups of one pool while they are there.

    Attributes:
        score_s: how long each score takes.
        longest_wait_s: the longest time that a group was in the queue.
    """

    def __init__(self, bus: MemoryBus, pool: str) -> None:
        self.bus = bus
        self.pool = pool
        self.score_s = SCORE_S
        self.longest_wait_s = 0.0
        self._away_until = -1.0
        self._freeze = _Freeze()
        # ticket -> its group, and when it was taken
        self._scoring: dict[int, tuple[wire.Group, float]] = {}
        self._arrived: dict[int, float] = {}  # ticket -> when its group was first seen in the queue
        self._presence: wire.Presence | None = None

    def alive(self) -> list[wire.Presence]:
        now = asyncio.get_running_loop().time()
        is_gone = now < self._away_until or self._freeze.is_forgotten(now)
        return [self._presence] if self._presence is not None and not is_gone else []

    def leave(self, seconds: float) -> None:
        """Kill every reward hub; others come after some time."""
        self._away_until = asyncio.get_running_loop().time() + seconds
        self._return_groups()

    def freeze(self, seconds: float) -> None:
        """Stop every reward hub for some time."""
        now = asyncio.get_running_loop().time()
        self._freeze = _Freeze(now, now + seconds)

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(LOOK_S)
            now = loop.time()
            for message in self.bus.queued(EPISODES, self.pool):
                self._arrived.setdefault(message.ticket, now)
            if self._freeze.is_lapsed(now):
                self._return_groups()
            if now >= self._away_until and not self._freeze.covers(now):
                await self._turn(now)

    async def _turn(self, now: float) -> None:
        for number, (group, began) in list(self._scoring.items()):
            if now - began >= self.score_s:
                del self._scoring[number]
                await self.bus.publish(
                    SAMPLES, msgspec.structs.replace(group, pools=[]), ticket=number
                )
        while (
            len(self._scoring) < SCORERS
            and (message := self.bus.take(EPISODES, self.pool)) is not None
        ):
            assert isinstance(message, wire.Group)
            group = message
            self._scoring[group.ticket] = group, now
            waited_s = now - self._arrived.pop(group.ticket, now)
            self.longest_wait_s = max(self.longest_wait_s, waited_s)
        self._presence = _presence("rewardhub", "scorers", [self.pool], list(self._scoring))

    def _return_groups(self) -> None:
        for group, _ in self._scoring.values():
            self.bus.give_back(EPISODES, self.pool, group)
        self._scoring.clear()


def _presence(role: str, name: str, serves: list[str], tickets: list[int]) -> wire.Presence:
    host = socket.gethostname()
    return wire.Presence(
        role=role, id=name, host=host, pid=1, state="serving", serves=serves, tickets=tickets
    )


def _group(ticket: AnyTicket, version: int, pools: list[str]) -> wire.Group:
    episode = wire.Trajectory(
        episode=0,
        token_ids=wire.column([1, 2], "<i4"),
        loss_mask=wire.column([0, 1], "|u1"),
        logprobs=wire.column([0.0, -1.0], "<f4"),
        version_runs=wire.column([version, 1], "<i4"),
        turns=[],
        reward=0.0,
        reward_parts={},
        success=False,
        end="terminated",
    )
    return wire.Group(
        ticket=ticket.number,
        domain=ticket.domain,
        task_index=ticket.task_index,
        min_version=ticket.min_version,
        hub="hubs",
        deliveries=1,
        pools=pools,
        trajectories=[episode],
        eval_step=ticket.eval_step if isinstance(ticket, wire.EvalTicket) else -1,
    )
