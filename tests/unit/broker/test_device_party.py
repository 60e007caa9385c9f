"""A lease on a device under any interleaving of reads, writes, crashes, silences and clocks that
differ.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from broker.contract import codec, wire
from broker.runtime.device_party import ABSENT_S, MARGIN_S, RENEW_S, TTL_S, DeviceParty


@dataclass
class Store:
    """The bucket's entry of one device."""

    lease: wire.DeviceLease | None = None
    revision: int = 0

    def swap(self, lease: wire.DeviceLease, revision: int) -> bool:
        codec.decode(codec.encode(lease), wire.DeviceLease)
        if revision != self.revision:
            return False
        self.lease, self.revision = lease, self.revision + 1
        return True


@dataclass
class Process:
    """A process with a clock of its own: ``now = offset + rate * time``."""

    party: DeviceParty
    exclusive: bool
    offset: float
    rate: float
    on_device: bool = False
    pending: tuple[wire.DeviceLease, int, float] | None = None  # computed, not yet sent

    def now(self, time: float) -> float:
        return self.offset + self.rate * time


def exchange(process: Process, store: Store, time: float, *, reply_lost: bool = False) -> None:
    wanted = process.party.next(store.lease, process.now(time))
    if wanted is not None and store.swap(wanted, store.revision) and not reply_lost:
        process.party.stored(wanted, process.now(time))


def settle(processes: list[Process], store: Store, time: float, seconds: float) -> float:
    """Let all processes exchange every half second for a while; return the time."""
    for _ in range(round(seconds / 0.5)):
        time += 0.5
        for process in processes:
            exchange(process, store, time)
    return time


class Machine(RuleBasedStateMachine):
    """Two learners (one takes over) and three servers; users of the device leave it once it is lost
    or asked for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.store, self.time, self.serial = Store(), 100.0, 0
        self.processes: list[Process] = []

    def begin(self, *, exclusive: bool, offset: float, rate: float) -> None:
        self.serial += 1
        holder = f"{'learner' if exclusive else 'rollout'}-{self.serial}"
        self.processes.append(
            Process(DeviceParty(holder, exclusive=exclusive), exclusive, offset, rate)
        )

    @initialize(offsets=st.lists(st.floats(-1e6, 1e6), min_size=5, max_size=5),
                rates=st.lists(st.floats(0.97, 1.03), min_size=5, max_size=5))  # fmt: skip
    def start(self, offsets: list[float], rates: list[float]) -> None:
        self.store.lease = wire.DeviceLease()
        for index, (offset, rate) in enumerate(zip(offsets, rates, strict=True)):
            self.begin(exclusive=index < 2, offset=offset, rate=rate)
            self.processes[index].party.wanted = True

    @rule(pick=st.integers(0, 4), reply_lost=st.booleans())
    def exchanges(self, pick: int, reply_lost: bool) -> None:
        exchange(self.processes[pick], self.store, self.time, reply_lost=reply_lost)
        self.obey()

    @rule(pick=st.integers(0, 4))
    def reads(self, pick: int) -> None:
        process = self.processes[pick]
        wanted = process.party.next(self.store.lease, process.now(self.time))
        process.pending = (
            (wanted, self.store.revision, process.now(self.time)) if wanted is not None else None
        )
        self.obey()

    @rule(pick=st.integers(0, 4))
    def writes(self, pick: int) -> None:
        process = self.processes[pick]
        if process.pending is not None:
            lease, revision, sent_at = process.pending
            if self.store.swap(lease, revision):
                process.party.stored(lease, sent_at)
            process.pending = None

    @rule(pick=st.integers(0, 4), wanted=st.booleans())
    def wants(self, pick: int, wanted: bool) -> None:
        process = self.processes[pick]
        if wanted or not process.on_device:
            process.party.wanted = wanted

    @rule(pick=st.integers(0, 4))
    def enters(self, pick: int) -> None:
        process = self.processes[pick]
        process.on_device = process.on_device or process.party.has(process.now(self.time))

    @rule(pick=st.integers(0, 4))
    def leaves(self, pick: int) -> None:
        self.processes[pick].on_device = False

    @rule(pick=st.integers(0, 4), offset=st.floats(-1e6, 1e6))
    def is_killed(self, pick: int, offset: float) -> None:
        """The claim stays; another start of the process has another holder and another clock."""
        killed = self.processes[pick]
        self.begin(exclusive=killed.exclusive, offset=offset, rate=killed.rate)
        self.processes[pick] = self.processes.pop()

    @rule(seconds=st.floats(0.01, 4.0))
    def passes(self, seconds: float) -> None:
        self.time += seconds
        self.obey()

    @precondition(lambda self: self.processes)
    @rule(seconds=st.floats(2 * TTL_S, 10 * TTL_S))
    def is_silent(self, seconds: float) -> None:
        """All processes lose the broker; those with the device leave it in time."""
        self.time += seconds
        self.obey()

    @precondition(lambda self: self.processes)
    @rule(picks=st.sets(st.integers(0, 4), min_size=1), seconds=st.integers(1, 25))
    def lives(self, picks: set[int], seconds: int) -> None:
        """Some processes work as they should; the others are frozen."""
        for _ in range(seconds):
            self.time += 1.0
            for pick in sorted(picks):
                self.exchanges(pick, False)
                self.enters(pick)
                self.a_learner_is_alone()

    def obey(self) -> None:
        for process in self.processes:
            process.on_device = process.on_device and process.party.has(process.now(self.time))

    @invariant()
    def a_learner_is_alone(self) -> None:
        there = [process for process in self.processes if process.on_device]
        assert len(there) < 2 or not any(process.exclusive for process in there)

    def teardown(self) -> None:
        """Whatever happened, all get their turn: a learner first, then the servers together."""
        if not self.processes:
            return
        for process in self.processes:
            process.on_device, process.pending = False, None
            process.party.wanted = False
        self.time = settle(self.processes, self.store, self.time, 2 * TTL_S)
        assert self.store.lease == wire.DeviceLease()
        servers, learner = self.processes[2:], self.processes[0]
        for process in (*servers, learner):
            process.party.wanted = True
        self.time = settle(servers, self.store, self.time, 2.0)
        assert all(one.party.has(one.now(self.time)) and not one.party.asked for one in servers)
        self.time = settle(self.processes, self.store, self.time, 2.0)
        assert not learner.party.has(learner.now(self.time))
        assert all(one.party.asked for one in servers)
        for process in servers:
            process.party.wanted = False
            exchange(process, self.store, self.time)
            process.party.wanted = True
            exchange(process, self.store, self.time)  # not before the learner that waits
        self.time = settle(self.processes, self.store, self.time, 2.0)
        assert learner.party.has(learner.now(self.time))
        assert not any(one.party.has(one.now(self.time)) for one in servers)
        assert learner.party.asked


TestDeviceParty = Machine.TestCase
TestDeviceParty.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@dataclass
class Scene:
    """A learner and a server that want the device."""

    store: Store = field(default_factory=lambda: Store(wire.DeviceLease()))
    time: float = 0.0
    learner: Process = field(
        default_factory=lambda: Process(DeviceParty("learner", exclusive=True), True, 5e5, 1.0)
    )
    server: Process = field(
        default_factory=lambda: Process(DeviceParty("server", exclusive=False), False, -7.0, 1.0)
    )

    def run(self, seconds: float, *processes: Process) -> None:
        self.time = settle(list(processes), self.store, self.time, seconds)

    def claims(self) -> list[tuple[str, bool]]:
        """Return who claims the device, and whether they have it."""
        assert self.store.lease is not None
        return [(claim.holder, claim.granted) for claim in self.store.lease.claims]

    def has(self, process: Process) -> bool:
        return process.party.has(process.now(self.time))


def test_a_dead_holder_frees_the_device_after_the_time_limit() -> None:
    scene = Scene()
    scene.learner.party.wanted = scene.server.party.wanted = True
    scene.run(2.0, scene.learner)
    scene.run(TTL_S - 1.0, scene.server)  # the learner is dead
    assert not scene.has(scene.server)
    assert scene.server.party.blockers == ["learner"]
    scene.run(1.5, scene.server)
    assert scene.has(scene.server)
    assert not scene.has(scene.learner)  # it knows by its own clock, without the broker


def test_a_holder_without_broker_stops_before_others_begin() -> None:
    scene = Scene()
    scene.server.party.wanted = True
    scene.run(1.5, scene.server)
    scene.time += TTL_S - MARGIN_S - 0.1
    assert scene.has(scene.server)
    scene.time += 0.2
    assert not scene.has(scene.server)


def test_the_time_in_which_nobody_reads_does_not_end_a_claim() -> None:
    scene = Scene()
    scene.learner.party.wanted = scene.server.party.wanted = True
    scene.run(2.0, scene.learner, scene.server)
    scene.time += 5 * TTL_S  # the broker is away, for both
    scene.run(0.5, scene.server)
    assert scene.claims() == [("learner", True), ("server", False)]
    scene.run(1.0, scene.learner)
    assert scene.has(scene.learner)
    assert not scene.has(scene.server)


def test_who_has_the_device_says_so_again_when_the_broker_forgot() -> None:
    scene = Scene()
    scene.learner.party.wanted = scene.server.party.wanted = True
    scene.run(2.0, scene.learner, scene.server)
    scene.store.lease = None
    exchange(scene.server, scene.store, scene.time)
    assert scene.store.lease is None  # it waits for those that may have it
    scene.run(RENEW_S, scene.learner, scene.server)
    assert scene.has(scene.learner)
    assert not scene.has(scene.server)
    assert scene.claims() == [("learner", True), ("server", False)]


def test_a_forgotten_device_that_nobody_has_is_taken() -> None:
    scene = Scene(Store(None))
    scene.server.party.wanted = True
    scene.run(ABSENT_S, scene.server)
    assert not scene.has(scene.server)
    scene.run(1.0, scene.server)
    assert scene.has(scene.server)


def test_a_device_that_was_forgotten_and_taken_by_another_is_lost() -> None:
    scene = Scene()
    scene.learner.party.wanted = True
    scene.run(2.0, scene.learner)
    other = wire.DeviceClaim(holder="server", exclusive=False, granted=True, beat=3)
    scene.store.lease = wire.DeviceLease(claims=[other])
    scene.run(0.5, scene.learner)
    assert not scene.has(scene.learner)
    assert scene.claims() == [("server", True), ("learner", False)]
