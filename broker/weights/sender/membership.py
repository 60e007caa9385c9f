"""Decides which server is sent which version in which communicator; without clock and network.

Events are calls, actions are returned as lists. One transfer runs at a time. A started transfer is finished even when a
newer version appears, so a slow link cannot starve; servers that wait for an outdated version are refused.

A server that failed in a transfer is on probation: it is served alone, in its own communicator, after a delay that
doubles with each failure, and only while no other server waits. A successful transfer ends the probation. If a transfer
failed and the culprit is unknown, all its members are served alone next, without a delay. So no server loses two
transfers because of the same peer.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from broker.contract import wire
from broker.errors import WireError

FIRST_DELAY_S: Final = 5.0  # before a server on probation is served again
LONGEST_DELAY_S: Final = 300.0
MAX_PROBATION: Final = 10_000  # servers
MAX_DIGITS: Final = 18  # of a number, to fit into 64 bits


@dataclass(frozen=True)
class StartTransfer:
    """Send ``version`` to ``members`` (ordered by rank, from 1)."""

    session: str
    version: int
    members: tuple[str, ...]
    fresh: bool  # a new communicator is created; else the last session's is reused
    # of the members, the last: they read the sender's memory and are not in the communicator
    num_shared: int = 0
    alone: bool = False  # a server on probation; the others' communicator is kept

    @property
    def num_sent(self) -> int:
        """Members of the communicator, without the sender."""
        return len(self.members) - self.num_shared


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
    version: int
    members: tuple[str, ...]
    seen: set[str]  # members known to be alive; a new one may not be known yet
    alone: bool = False  # of a server on probation
    # one of them asked for the same version again: it restarted and lost its end of the communicator
    asked_again: bool = False
    gone: set[str] = field(default_factory=set)  # members that left
    gives_way: bool = False  # cancelled because others wait


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
        independent: a transfer goes on without members that fail or leave, and the others have the version.
    """

    def __init__(self, epoch: int, plan: str, *, gather_s: float, join_ttl_s: float, independent: bool = False) -> None:
        self.epoch, self.plan = epoch, plan
        self.version = -1  # newest on offer
        self._gather_s, self._join_ttl_s, self._independent = gather_s, join_ttl_s, independent
        self._joins: dict[str, float] = {}  # server -> time of its join for the newest version
        self._shared: set[str] = set()  # servers whose last join said that they can read the sender's memory
        self._gathering_since = 0.0
        self._running: _Running | None = None
        self._communicator: tuple[int, tuple[str, ...], int] | None = None  # serial, members, transfers so far
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
        refused: list[Action] = [RefuseJoin(server, f"superseded by version {version}") for server in self._joins]
        self._joins.clear()
        return refused

    def joined(self, join: wire.WeightsJoin, now: float) -> list[Action]:
        """Note that a server asks for a version; a repeated join replaces the earlier one."""
        if join.epoch != self.epoch:
            return [RefuseJoin(join.server, f"epoch {join.epoch} is over, this is epoch {self.epoch}")]
        if join.plan != self.plan:
            return [RefuseJoin(join.server, f"another model: bucket plan {join.plan} is not the offer's {self.plan}")]
        if join.version != self.version:
            return [RefuseJoin(join.server, f"superseded by version {self.version}")]
        if join.server in self._received:
            self._communicator = None  # it lost what it received, perhaps its end of the communicator too
        if self._running is not None and self._running.version == join.version and join.server in self._running.members:
            self._running.asked_again = True
        if not self._joins:
            self._gathering_since = now
        self._joins[join.server] = now
        (self._shared.add if join.shared else self._shared.discard)(join.server)
        return []

    def tick(self, now: float, expected: Collection[str] | None, alive: Collection[str] | None) -> list[Action]:
        """Advance the time.

        Args:
            expected: servers without the newest version, worth a short wait; None: unknown.
            alive: servers that are present; None: unknown.
        """
        if self._running is not None:
            if self._running.alone and self._joins.keys() - self._probation.keys():
                self._running.gives_way = True
                return [CancelTransfer("other servers wait")]
            if alive is None:
                return []
            self._running.seen.update(alive)
            gone = [server for server in self._running.members if server in self._running.seen and server not in alive]
            self._running.gone.update(gone)
            if self._independent and set(self._running.members) - self._running.gone:
                return []
            return [CancelTransfer(f"{', '.join(gone)} went away")] if gone else []
        for server in [server for server, since in self._joins.items() if now - since > self._join_ttl_s]:
            del self._joins[server]
        trusted = self._joins.keys() - self._probation.keys()
        if not trusted:
            times = [(self._probation[server].until, server) for server in self._joins]
            due = [(until, server) for until, server in times if until <= now]
            return [self._start({min(due)[1]}, alive or (), alone=True)] if due else []
        all_here = expected is not None and not set(expected) - self._probation.keys() - trusted
        if not all_here and now - self._gathering_since < self._gather_s:
            return []
        return [self._start(trusted, alive or ())]

    def _start(self, servers: Collection[str], alive: Collection[str], *, alone: bool = False) -> StartTransfer:
        sent = tuple(sorted(server for server in servers if server not in self._shared))
        shared = tuple(sorted(server for server in servers if server in self._shared))
        members = sent + shared
        for server in members:
            del self._joins[server]
        self._running = _Running(self.version, members, set(alive), alone=alone)
        if alone:
            self._serial += 1
            session = session_name(self.epoch, self._serial, 0)
            return StartTransfer(session, self.version, members, fresh=bool(sent), num_shared=len(shared), alone=True)
        if sent and self._communicator is not None and self._communicator[1] == sent:
            serial, _, uses = self._communicator
        else:
            self._serial += 1
            serial, uses = self._serial, 0
        if sent:  # otherwise an existing one waits for its members
            self._communicator = (serial, sent, uses + 1)
        name, fresh = session_name(self.epoch, serial, uses), bool(sent) and uses == 0
        return StartTransfer(name, self.version, members, fresh=fresh, num_shared=len(shared))

    def ended(self, now: float, failed: Collection[str] | None, *, ours: bool = False) -> None:
        """Note that the running transfer has ended.

        Args:
            now: seconds of any monotonic clock.
            failed: None if every member has its bytes; else the members known to be at fault.
            ours: it failed through the sender, or was cancelled: only members that left are at fault.
        """
        assert self._running is not None, "no transfer is running"
        running, self._running = self._running, None
        if not running.alone and (failed is not None or running.asked_again):
            self._communicator = None
        if failed is None:
            self._served(running.members, running.version)
        elif running.gone or not (ours or running.gives_way):
            blamed = running.gone | set(failed) if self._independent else running.gone or set(failed)
            self._suspect(running, blamed, now)
            if self._independent and failed:
                self._served(set(running.members) - blamed, running.version)
        self._gathering_since = now  # its members are likely to ask again right now

    def _served(self, servers: Collection[str], version: int) -> None:
        for server in servers:
            self._probation.pop(server, None)
        if version == self.version:
            self._received.update(servers)

    def _suspect(self, running: _Running, failed: set[str], now: float) -> None:
        blamed = failed & set(running.members)
        if len(running.members) == 1:
            blamed = set(running.members)
        for server in blamed or running.members:
            probation = self._probation.setdefault(server, _Probation(until=now))
            if blamed:
                probation.until = now + min(FIRST_DELAY_S * 2.0 ** min(probation.failures, 30), LONGEST_DELAY_S)
                probation.failures += 1
        while len(self._probation) > MAX_PROBATION:  # each start of a server has a new name
            del self._probation[min(self._probation, key=lambda server: self._probation[server].until)]


def session_name(epoch: int, serial: int, uses: int) -> str:
    """Return the id of a transfer: the communicator's name and the number of its earlier transfers."""
    return f"{epoch}-{serial}.{uses}"


def parse_session(session: str) -> tuple[str, int]:
    """Return a communicator's name and the number of its earlier transfers.

    Raises:
        WireError: if it is not a session id.
    """
    name, _, uses = session.rpartition(".")
    if not name or not (uses.isascii() and uses.isdigit() and len(uses) <= MAX_DIGITS):
        raise WireError(f"session {session[:80]!r}: expected a communicator and a number of uses")
    return name, int(uses)
