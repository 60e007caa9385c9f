"""Decides which server is sent which version in which communicator; without clock and network.

Events are calls, actions are returned as lists. One transfer runs at a time, by one carrier;
servers that read the sender's memory take part in any. Servers of another carrier follow at once,
in their own communicator. A started transfer is finished even when a newer version appears, so a
slow link cannot starve; servers that wait for an outdated version are refused.

A server that failed in a transfer is on probation: it is served alone, in its own communicator,
after a delay that doubles with each failure, and only while no other server waits. A successful
transfer ends the probation. If a transfer failed and the culprit is unknown, all its members are
served alone next, without a delay. So no server loses two transfers because of the same peer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from broker.contract import wire
from broker.weights.carriers import CARRIERS, READ
from broker.weights.carriers.selection import choose_carrier, describe_refusal
from broker.weights.protocol.session import session_name

FIRST_DELAY_S: Final = 5.0  # before a server on probation is served again
LONGEST_DELAY_S: Final = 300.0
MAX_PROBATION: Final = 10_000  # servers
GLOO: Final[wire.Carrier] = "gloo"


@dataclass(frozen=True)
class StartTransfer:
    """Send ``version`` to ``members``, ordered by rank from 1; a server stands there as often as it
    brings ranks.
    """

    session: str
    version: int
    members: tuple[str, ...]
    fresh: bool  # a new communicator is created; else the last session's is reused
    # of the members, the last: they read the sender's memory and are not in the communicator
    num_shared: int = 0
    alone: bool = False  # a server on probation; the others' communicator is kept
    carrier: wire.Carrier = "gloo"  # of the communicator

    @property
    def num_sent(self) -> int:
        """Members of the communicator, without the sender."""
        return len(self.members) - self.num_shared

    @property
    def servers(self) -> tuple[str, ...]:
        """The servers, each once, in the order of their first ranks."""
        return tuple(dict.fromkeys(self.members))

    @property
    def independent(self) -> bool:
        """Whether the transfer goes on without members that fail or leave, and the others have the
        version.
        """
        return CARRIERS[self.carrier].is_independent and not self.num_shared


@dataclass(frozen=True)
class RefuseJoin:
    """Answer a server's join with a reason."""

    server: str
    reason: str


@dataclass(frozen=True)
class CancelTransfer:
    """Cancel the running transfer."""

    reason: str


Action = StartTransfer | RefuseJoin | CancelTransfer


@dataclass
class _Running:
    start: StartTransfer
    seen: set[str]  # members known to be alive; a new one may not be known yet
    # one of them asked for the same version again: it restarted and lost its end of the
    # communicator
    asked_again: bool = False
    gone: set[str] = field(default_factory=set)  # members that left
    gives_way: bool = False  # cancelled because others wait

    @property
    def version(self) -> int:
        return self.start.version

    @property
    def servers(self) -> tuple[str, ...]:
        return self.start.servers


@dataclass
class _Probation:
    failures: int = 0  # 0: it was in a transfer that failed, perhaps through another member
    until: float = 0.0  # when it may be served again


class TransferMembership:
    """State of the sender.

    Args:
        epoch: of the learner.
        plan: digest of the bucket plan.
        gather_s: how long to wait for more joins after the first.
        join_ttl_s: age at which a join is forgotten; its server has stopped waiting and asks again.
        carriers: that the sender offers, best first.
    """

    def __init__(
        self,
        epoch: int,
        plan: str,
        *,
        gather_s: float,
        join_ttl_s: float,
        carriers: Sequence[wire.Carrier],
    ) -> None:
        self.epoch = epoch
        self.plan = plan
        self.version = -1  # newest on offer
        self._gather_s = gather_s
        self._join_ttl_s = join_ttl_s
        self._carriers = tuple(carriers)
        self._joins: dict[str, float] = {}  # server -> time of its join for the newest version
        # server -> carrier and ranks of its last join
        self._ways: dict[str, tuple[wire.Carrier, int]] = {}
        self._gathering_since = 0.0
        self._gathered = False  # the joins that are left had to wait for another carrier's transfer
        self._running: _Running | None = None
        # carrier -> serial, members, transfers so far
        self._communicators: dict[wire.Carrier, tuple[int, tuple[str, ...], int]] = {}
        self._serial = 0
        self._received: set[str] = set()  # members of finished transfers of the newest version
        self._probation: dict[str, _Probation] = {}

    @property
    def busy(self) -> bool:
        """Return whether there is anything to wait for."""
        return self._running is not None or bool(self._joins)

    def offered(self, version: int) -> list[Action]:
        """Note that a newer version is on offer."""
        self.version = version
        self._received.clear()
        self._gathered = False
        refused: list[Action] = [
            RefuseJoin(server, f"superseded by version {version}") for server in self._joins
        ]
        self._joins.clear()
        return refused

    def joined(self, join: wire.WeightsJoin, now: float) -> list[Action]:
        """Note that a server asks for a version; a repeated join replaces the earlier one."""
        if join.epoch != self.epoch:
            return [
                RefuseJoin(join.server, f"epoch {join.epoch} is over, this is epoch {self.epoch}")
            ]
        if join.plan != self.plan:
            return [
                RefuseJoin(
                    join.server,
                    f"another model: bucket plan {join.plan} is not the offer's {self.plan}",
                )
            ]
        if join.version != self.version:
            return [RefuseJoin(join.server, f"superseded by version {self.version}")]
        if (carrier := choose_carrier(self._carriers, join.carriers)) is None:
            return [RefuseJoin(join.server, describe_refusal(self._carriers, join.carriers))]
        if join.server in self._received:
            # it lost what it received, perhaps its end of the communicator too
            self._drop_communicators(join.server)
        if (
            self._running is not None
            and self._running.version == join.version
            and join.server in self._running.servers
        ):
            self._running.asked_again = True
        if not self._joins:
            self._gathering_since = now
        self._joins[join.server] = now
        self._ways[join.server] = carrier, join.carriers[carrier]
        return []

    def _drop_communicators(self, server: str) -> None:
        for carrier in [
            carrier for carrier, (_, members, _) in self._communicators.items() if server in members
        ]:
            del self._communicators[carrier]

    def tick(
        self, now: float, expected: Collection[str] | None, alive: Collection[str] | None
    ) -> list[Action]:
        """Advance the time.

        Args:
            expected: servers without the newest version, worth a short wait; None: unknown.
            alive: servers that are present; None: unknown.
        """
        if self._running is not None:
            if self._running.start.alone and self._joins.keys() - self._probation.keys():
                self._running.gives_way = True
                return [CancelTransfer("other servers wait")]
            if alive is None:
                return []
            self._running.seen.update(alive)
            departed = [
                server
                for server in self._running.servers
                if server in self._running.seen and server not in alive
            ]
            self._running.gone.update(departed)
            if self._running.start.independent and set(self._running.servers) - self._running.gone:
                return []
            return [CancelTransfer(f"{', '.join(departed)} went away")] if departed else []
        for server in [
            server for server, since in self._joins.items() if now - since > self._join_ttl_s
        ]:
            del self._joins[server]
        trusted = self._joins.keys() - self._probation.keys()
        if not trusted:
            times = [(self._probation[server].until, server) for server in self._joins]
            expired = [(until, server) for until, server in times if until <= now]
            return [self._start({min(expired)[1]}, alive or (), alone=True)] if expired else []
        all_here = expected is not None and not set(expected) - self._probation.keys() - trusted
        if not (all_here or self._gathered) and now - self._gathering_since < self._gather_s:
            return []
        return [self._start(trusted, alive or ())]

    def _start(
        self, servers: Collection[str], alive: Collection[str], *, alone: bool = False
    ) -> StartTransfer:
        preferred = {self._ways[server][0] for server in servers}
        carrier = next(
            (candidate for candidate in self._carriers if candidate in preferred - READ), GLOO
        )
        receivers = tuple(
            server for server in sorted(servers) for way, ranks in [self._ways[server]] if way == carrier
            for _ in range(ranks)
        )  # fmt: skip
        readers = tuple(
            server for server in sorted(servers) for way, ranks in [self._ways[server]] if way in READ
            for _ in range(ranks)
        )  # fmt: skip
        start = self._place(receivers, readers, carrier, alone=alone)
        for server in start.servers:
            del self._joins[server]
        self._gathered = bool(self._joins.keys() - self._probation.keys())
        self._running = _Running(start, set(alive))
        return start

    def _place(
        self,
        receivers: tuple[str, ...],
        readers: tuple[str, ...],
        carrier: wire.Carrier,
        *,
        alone: bool,
    ) -> StartTransfer:
        """Return a transfer in the members' communicator if they have one, else in a new one."""
        serial, members, uses = self._communicators.get(carrier, (0, (), 0))
        if alone or not receivers or members != receivers:
            self._serial += 1
            serial = self._serial
            uses = 0
        if receivers and not alone:  # otherwise an existing one waits for its members
            self._communicators[carrier] = (serial, receivers, uses + 1)
        name = session_name(self.epoch, serial, uses)
        fresh = bool(receivers) and uses == 0
        return StartTransfer(
            name,
            self.version,
            receivers + readers,
            fresh=fresh,
            num_shared=len(readers),
            alone=alone,
            carrier=carrier,
        )

    def ended(self, now: float, failed: Collection[str] | None, *, ours: bool = False) -> None:
        """Note that the running transfer has ended.

        Args:
            now: seconds of any monotonic clock.
            failed: None if every member has its bytes; else the members known to be at fault.
            ours: it failed through the sender, or was cancelled: only members that left are at
                fault.
        """
        assert self._running is not None, "no transfer is running"
        running = self._running
        self._running = None
        if not running.start.alone and (failed is not None or running.asked_again):
            self._communicators.pop(running.start.carrier, None)
        if failed is None:
            self._served(running.servers, running.version)
        elif running.gone or not (ours or running.gives_way):
            blamed = (
                running.gone | set(failed)
                if running.start.independent
                else running.gone or set(failed)
            )
            self._suspect(running, blamed, now)
            if running.start.independent and failed:
                self._served(set(running.servers) - blamed, running.version)
        self._gathering_since = now  # its members are likely to ask again right now

    def _served(self, servers: Collection[str], version: int) -> None:
        for server in servers:
            self._probation.pop(server, None)
        if version == self.version:
            self._received.update(servers)

    def _suspect(self, running: _Running, failed: set[str], now: float) -> None:
        blamed = failed & set(running.servers)
        if len(running.servers) == 1:
            blamed = set(running.servers)
        for server in blamed or running.servers:
            probation = self._probation.setdefault(server, _Probation(until=now))
            if blamed:
                probation.until = now + min(
                    FIRST_DELAY_S * 2.0 ** min(probation.failures, 30), LONGEST_DELAY_S
                )
                probation.failures += 1
        while len(self._probation) > MAX_PROBATION:  # each start of a server has a new name
            del self._probation[
                min(self._probation, key=lambda server: self._probation[server].until)
            ]
