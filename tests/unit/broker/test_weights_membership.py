"""Who is sent what in which communicator: by hand, and under any interleaving."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from broker.contract import wire
from broker.weights.protocol.session import parse_session
from broker.weights.sender.membership import (
    FIRST_DELAY_S,
    LONGEST_DELAY_S,
    Action,
    CancelTransfer,
    RefuseJoin,
    StartTransfer,
    TransferMembership,
)

GATHER_S, TTL_S = 0.5, 5.0


def join(
    server: str, version: int, *, epoch: int = 1, plan: str = "p", shared: bool = False, **ways: int
) -> wire.WeightsJoin:
    carriers: Any = ways or ({"shared": int(shared), "gloo": 1} if shared else {"gloo": 1})
    return wire.WeightsJoin(
        server=server, epoch=epoch, version=version, plan=plan, key="k" * 40, carriers=carriers
    )


def make(version: int = 1) -> TransferMembership:
    state = TransferMembership(
        1, "p", gather_s=GATHER_S, join_ttl_s=TTL_S, carriers=["shared", "gloo"]
    )
    assert state.offered(version) == []
    return state


def test_waits_for_the_expected_and_starts_when_they_are_here() -> None:
    state = make()
    assert state.joined(join("b", 1), 10.0) == []
    assert state.tick(10.1, {"a", "b"}, None) == []
    assert state.joined(join("a", 1), 10.2) == []
    assert state.tick(10.2, {"a", "b"}, None) == [StartTransfer("1-1.0", 1, ("a", "b"), fresh=True)]


def test_does_not_wait_longer_than_the_gathering_time() -> None:
    for expected in (None, {"a", "b"}):
        state = make()
        state.joined(join("b", 1), 10.0)
        assert state.tick(10.49, expected, None) == []
        assert state.tick(10.51, expected, None) == [StartTransfer("1-1.0", 1, ("b",), fresh=True)]


def test_same_members_use_the_communicator_again() -> None:
    state = make()
    sessions = []
    for version, members in ((1, "ab"), (2, "ab"), (3, "a"), (4, "a"), (5, "ab")):
        if version > 1:
            state.offered(version)
        for server in members:
            state.joined(join(server, version), 0.0)
        (start,) = state.tick(0.0, set(members), None)
        assert isinstance(start, StartTransfer)
        sessions.append((start.session, start.fresh))
        state.ended(0.0, None)
    assert sessions == [
        ("1-1.0", True),
        ("1-1.1", False),
        ("1-2.0", True),
        ("1-2.1", False),
        ("1-3.0", True),
    ]


def test_independent_members_are_not_ended_by_one_that_leaves_or_fails() -> None:
    state = TransferMembership(1, "p", gather_s=GATHER_S, join_ttl_s=TTL_S, carriers=["curve"])
    state.offered(1)
    for server in "abc":
        state.joined(join(server, 1, curve=1), 0.0)
    (start,) = state.tick(0.0, set("abc"), set("abc"))
    assert isinstance(start, StartTransfer)
    assert state.tick(1.0, set(), {"a", "b"}) == []
    state.ended(2.0, {"c", "b"})  # c went away, b failed, a has the version
    for server in "ab":
        state.joined(join(server, 1, curve=1), 2.0)
    assert state.tick(2.0, {"a"}, {"a", "b"}) == [
        StartTransfer("1-2.0", 1, ("a",), fresh=True, carrier="curve")
    ]  # b is on probation
    assert state.tick(3.0, set(), set()) == [CancelTransfer("a went away")]  # nobody is left


def test_each_carrier_has_its_own_transfer_and_communicator_and_follows_at_once() -> None:
    state = TransferMembership(
        1, "p", gather_s=GATHER_S, join_ttl_s=TTL_S, carriers=["nccl", "shared", "gloo"]
    )
    starts = []
    for version in (1, 2):
        state.offered(version)
        state.joined(join("a", version, gloo=1), 0.0)
        state.joined(join("b", version, nccl=2, gloo=1), 0.0)  # two workers
        state.joined(join("c", version, shared=2), 0.0)  # two workers, which read
        state.joined(join("d", version, curve=1, gloo=1), 0.0)  # its best is not offered
        # nobody is not waited for a second time
        for expected in ({"a", "b", "c", "d"}, {"a", "d", "nobody"}):
            (start,) = state.tick(0.0, expected, None)
            assert isinstance(start, StartTransfer)
            starts.append(
                (start.session, start.carrier, start.members, start.num_sent, start.fresh)
            )
            state.ended(0.0, None)
        assert state.tick(0.0, set(), None) == []
    assert starts == [
        ("1-1.0", "nccl", ("b", "b", "c", "c"), 2, True),
        ("1-2.0", "gloo", ("a", "d"), 2, True),
        ("1-1.1", "nccl", ("b", "b", "c", "c"), 2, False),
        ("1-2.1", "gloo", ("a", "d"), 2, False),
    ]


def test_a_failure_costs_only_the_communicator_of_its_carrier() -> None:
    state = TransferMembership(
        1, "p", gather_s=GATHER_S, join_ttl_s=TTL_S, carriers=["nccl", "gloo"]
    )
    for version, sessions in ((1, ["1-1.0", "1-2.0"]), (2, ["1-3.0", "1-2.1"])):
        state.offered(version)
        state.joined(join("a", version, nccl=1), 0.0)
        state.joined(join("b", version, gloo=1), 0.0)
        for number, session in enumerate(sessions):
            (start,) = state.tick(0.0, {"a", "b"}, None)
            assert isinstance(start, StartTransfer)
            assert start.session == session
            state.ended(0.0, set() if (version, number) == (1, 0) else None, ours=True)


def test_without_a_common_carrier_both_sides_are_named() -> None:
    state = TransferMembership(1, "p", gather_s=GATHER_S, join_ttl_s=TTL_S, carriers=["nccl"])
    state.offered(1)
    reason = (
        "the learner sends by nccl, this server takes gloo, curve; set train.weights_backend=auto"
    )
    assert state.joined(join("a", 1, gloo=1, curve=1), 0.0) == [RefuseJoin("a", reason)]


def test_who_reads_the_senders_memory_is_in_no_communicator_and_ends_none() -> None:
    state = make()
    starts = []
    # capitals can
    for version, members in ((1, "aBcD"), (2, "aBcD"), (3, "BD"), (4, "ac"), (5, "a")):
        if version > 1:
            state.offered(version)
        for server in members:
            state.joined(join(server, version, shared=server.isupper()), 0.0)
        (start,) = state.tick(0.0, set(members), None)
        assert isinstance(start, StartTransfer)
        assert start.num_sent == len(start.members) - start.num_shared
        starts.append((start.session, "".join(start.members), start.fresh, start.num_shared))
        state.ended(0.0, None)
    assert starts == [
        ("1-1.0", "acBD", True, 2),
        ("1-1.1", "acBD", False, 2),
        ("1-2.0", "BD", False, 2),
        ("1-1.2", "ac", False, 0),
        ("1-3.0", "a", True, 0),
    ]


def test_failure_ends_the_communicator_and_the_failed_are_not_waited_for() -> None:
    state = make()
    for server in "ab":
        state.joined(join(server, 1), 0.0)
    state.tick(0.0, {"a", "b"}, None)
    state.ended(1.0, {"a"})
    state.joined(join("b", 1), 1.0)
    assert state.tick(1.0, {"a", "b"}, None) == [StartTransfer("1-2.0", 1, ("b",), fresh=True)]
    state.ended(2.0, None)
    state.joined(join("a", 1), 3.0)
    assert state.tick(3.0, {"a"}, None) == []  # not yet
    state.joined(join("a", 1), 1.0 + FIRST_DELAY_S)  # it was only slow
    assert state.tick(1.0 + FIRST_DELAY_S, {"a"}, None) == [
        StartTransfer("1-3.0", 1, ("a",), fresh=True, alone=True)
    ]


def test_a_server_on_probation_is_served_alone_after_growing_delays_until_it_succeeds() -> None:
    state, now, delays = make(), 0.0, []
    for server in "ab":
        state.joined(join(server, 1), now)
    state.tick(now, {"a", "b"}, None)
    state.ended(now, {"a"})
    state.joined(join("b", 1), now)
    assert state.tick(now, {"a", "b"}, None) == [StartTransfer("1-2.0", 1, ("b",), fresh=True)]
    state.ended(now, None)
    for _ in range(8):
        began = now
        while True:
            state.joined(join("a", 1), now)
            if actions := state.tick(now, {"a"}, None):
                break
            now += 1.0
        delays.append(now - began)
        (start,) = actions
        assert isinstance(start, StartTransfer)
        assert (start.members, start.alone) == (("a",), True)
        state.ended(now, set())  # nothing said who it was, but there was only one
    assert delays == [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0]
    state.offered(2)
    state.joined(join("b", 2), now)
    assert state.tick(now, {"a", "b"}, None) == [
        StartTransfer("1-2.1", 2, ("b",), fresh=False)
    ]  # nobody waits for a; the communicator is kept
    state.ended(now, None)
    now += LONGEST_DELAY_S
    state.joined(join("a", 2), now)
    (start,) = state.tick(now, {"a"}, None)
    assert isinstance(start, StartTransfer)
    state.ended(now, None)
    state.offered(3)
    for server in "ab":
        state.joined(join(server, 3), now)
    (start,) = state.tick(now, {"a", "b"}, None)
    assert isinstance(start, StartTransfer)
    assert (start.members, start.alone) == (("a", "b"), False)


def test_where_nothing_tells_who_is_to_blame_all_are_served_alone_next() -> None:
    state = make()
    for server in "abc":
        state.joined(join(server, 1), 0.0)
    state.tick(0.0, set("abc"), None)
    state.ended(5.0, set())
    served = []
    for _ in range(3):
        for server in set("abc") - set(served):
            state.joined(join(server, 1), 5.0)
        (start,) = state.tick(5.0, set("abc"), None)
        assert isinstance(start, StartTransfer)
        (server,) = start.members
        served.append(server)
        state.ended(5.0, {"b"} if server == "b" else None)
    assert sorted(served) == ["a", "b", "c"]
    state.offered(2)
    for server in "abc":
        state.joined(join(server, 2), 6.0)
    (start,) = state.tick(6.0, set("abc"), None)
    assert isinstance(start, StartTransfer)
    assert start.members == ("a", "c")


def test_what_is_the_senders_own_fault_puts_nobody_on_probation() -> None:
    state = make()
    for server in "ab":
        state.joined(join(server, 1), 0.0)
    state.tick(0.0, {"a", "b"}, {"a", "b"})
    state.ended(1.0, set(), ours=True)
    for server in "ab":
        state.joined(join(server, 1), 1.0)
    assert state.tick(1.0, {"a", "b"}, {"a", "b"}) == [
        StartTransfer("1-2.0", 1, ("a", "b"), fresh=True)
    ]
    assert state.tick(2.0, set(), {"b"}) == [CancelTransfer("a went away")]
    state.ended(2.0, set(), ours=True)
    for server in "ab":
        state.joined(join(server, 1), 2.0)
    assert state.tick(2.0, {"a", "b"}, {"a", "b"}) == [
        StartTransfer("1-3.0", 1, ("b",), fresh=True)
    ]


def test_a_transfer_on_probation_gives_way_to_other_servers_and_is_not_counted() -> None:
    state = make()
    for server in "ab":
        state.joined(join(server, 1), 0.0)
    state.tick(0.0, {"a", "b"}, None)
    state.ended(0.0, {"a"})
    state.joined(join("a", 1), 5.0)
    (start,) = state.tick(5.0, None, None)
    assert isinstance(start, StartTransfer)
    assert start.alone
    state.joined(join("b", 1), 5.1)
    assert state.tick(5.1, None, None) == [CancelTransfer("other servers wait")]
    state.ended(5.2, set(), ours=True)
    (start,) = state.tick(5.8, None, None)
    assert isinstance(start, StartTransfer)
    assert start.members == ("b",)
    state.ended(6.0, None)
    state.joined(join("a", 1), 6.0)
    (start,) = state.tick(6.0, None, None)
    assert isinstance(start, StartTransfer)
    assert start.members == ("a",)  # at once


def test_server_that_asks_again_for_what_it_got_gets_a_new_communicator() -> None:
    state = make()
    for _ in range(2):
        state.joined(join("a", 1), 0.0)
        (start,) = state.tick(0.0, {"a"}, None)
        assert isinstance(start, StartTransfer)
        assert start.fresh
        state.ended(0.0, None)


def test_server_that_asks_again_in_its_transfer_gets_a_new_communicator_for_the_next_version() -> (
    None
):
    """It was started anew behind its last byte, so its end of the communicator is gone, and a newer
    version comes up before the end.
    """
    state = make()
    state.joined(join("a", 1), 0.0)
    state.tick(0.0, {"a"}, None)
    state.joined(join("a", 1), 0.1)
    assert state.offered(2) == [RefuseJoin("a", "superseded by version 2")]
    state.ended(0.2, None)
    state.joined(join("a", 2), 0.3)
    assert state.tick(0.3, {"a"}, None) == [StartTransfer("1-2.0", 2, ("a",), fresh=True)]


def test_refusals() -> None:
    state = make(version=4)
    assert state.joined(join("a", 4, epoch=2), 0.0) == [
        RefuseJoin("a", "epoch 2 is over, this is epoch 1")
    ]
    assert state.joined(join("a", 3), 0.0) == [RefuseJoin("a", "superseded by version 4")]
    assert state.joined(join("a", 4, plan="q"), 0.0) == [
        RefuseJoin("a", "another model: bucket plan q is not the offer's p")
    ]
    state.joined(join("a", 4), 0.0)
    assert state.offered(5) == [RefuseJoin("a", "superseded by version 5")]
    assert state.tick(9.0, set(), None) == []


def test_join_whose_server_gave_up_waiting_is_forgotten() -> None:
    state = make()
    state.joined(join("a", 1), 0.0)
    assert state.tick(TTL_S + 0.1, {"a"}, None) == []
    assert not state.busy


def test_running_transfer_goes_on_beside_a_newer_offer_and_later_joins_wait() -> None:
    state = make()
    state.joined(join("a", 1), 0.0)
    state.tick(0.0, {"a"}, {"a"})
    state.offered(2)
    state.joined(join("b", 2), 0.1)
    assert state.tick(0.1, {"b"}, {"a", "b"}) == []
    state.ended(0.2, None)
    assert state.tick(0.2, {"b"}, {"a", "b"}) == [StartTransfer("1-2.0", 2, ("b",), fresh=True)]


def test_member_that_goes_away_ends_the_transfer() -> None:
    state = make()
    for server in "ab":
        state.joined(join(server, 1), 0.0)
    state.tick(0.0, {"a", "b"}, {"a", "b"})
    assert state.tick(0.1, set(), {"a", "b"}) == []
    assert state.tick(0.2, set(), {"b"}) == [CancelTransfer("a went away")]
    assert state.tick(0.3, None, None) == []


def test_member_whose_presence_is_not_known_yet_is_not_gone() -> None:
    state = make()
    state.joined(join("a", 1), 0.0)
    assert state.tick(1.0, set(), set()) == [StartTransfer("1-1.0", 1, ("a",), fresh=True)]
    assert state.tick(1.1, set(), set()) == []
    assert state.tick(1.2, set(), {"a"}) == []
    assert state.tick(1.3, set(), set()) == [CancelTransfer("a went away")]


def test_session_names() -> None:
    assert parse_session("3-14.2") == ("3-14", 2)


class Interleavings(RuleBasedStateMachine):
    """Servers with communicators of their own, and a sender that may be interrupted anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.version = 0.0, 0
        self.state = TransferMembership(
            1, "p", gather_s=GATHER_S, join_ttl_s=TTL_S, carriers=["shared", "gloo"]
        )
        self.state.offered(0)
        self.waiting: dict[str, int] = {}  # server -> version it asked for
        self.since: dict[str, float] = {}  # server -> when it asked
        # server -> whether it said that it reads the sender's memory
        self.shared: dict[str, bool] = {}
        self.known: dict[str, str] = {}  # server -> the communicator it has
        self.running: StartTransfer | None = None
        self.gives_way = False  # the running transfer was cancelled because others wait
        # were in a transfer that failed, by their fault or for all that is known
        self.suspects: set[str] = set()

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, RefuseJoin):
                self.waiting.pop(action.server, None)
            elif isinstance(action, CancelTransfer):
                assert self.running is not None
                assert self.running.alone
                assert self.waiting.keys() - self.suspects, "only for others"
                self.gives_way = True
            elif isinstance(action, StartTransfer):
                assert self.running is None, "two transfers at once"
                assert action.version == self.version, "only the newest is started"
                sent, read = action.members[: action.num_sent], action.members[action.num_sent :]
                assert list(sent) == sorted(
                    {server for server in action.members if not self.shared[server]}
                )
                assert list(read) == sorted(
                    {server for server in action.members if self.shared[server]}
                )
                name, uses = parse_session(action.session)
                assert action.fresh == (bool(sent) and uses == 0)
                for server in action.members:
                    assert self.waiting.pop(server) == action.version, (
                        "only those who asked and still wait"
                    )
                    assert server not in self.suspects or len(action.members) == 1, (
                        "nobody waits twice for the same peer"
                    )
                    if server in read:
                        continue
                    if action.fresh:
                        self.known[server] = name
                    else:
                        assert self.known[server] == name, (
                            "used again only where every member has it"
                        )
                assert action.alone == (action.members[0] in self.suspects)
                if action.alone:
                    assert self.waiting.keys() <= self.suspects, "only while no other server waits"
                self.running = action

    @rule(server=st.sampled_from("abcd"), shared=st.booleans())
    def join_newest(self, server: str, shared: bool) -> None:
        if (
            self.running is not None
            and server in self.running.members
            and self.running.version == self.version
        ):
            self.known.pop(server, None)  # it was restarted
        self.waiting[server], self.since[server], self.shared[server] = (
            self.version,
            self.now,
            shared,
        )
        self.perform(self.state.joined(join(server, self.version, shared=shared), self.now))

    @rule(server=st.sampled_from("abcd"))
    def join_older(self, server: str) -> None:
        if self.version and server not in self.waiting:
            assert self.state.joined(join(server, self.version - 1), self.now) == [
                RefuseJoin(server, f"superseded by version {self.version}")
            ]

    @rule()
    def offer(self) -> None:
        self.version += 1
        self.perform(self.state.offered(self.version))
        assert not self.waiting, "whoever waited was told"

    @rule(
        seconds=st.floats(0.01, 2.0) | st.just(FIRST_DELAY_S),
        expected=st.none() | st.sets(st.sampled_from("abcd")),
    )
    def time_passes(self, seconds: float, expected: set[str] | None) -> None:
        self.now += seconds
        # who has waited longer, behind a slow transfer, has given up and will ask again
        if self.running is None:
            self.waiting = {
                server: version
                for server, version in self.waiting.items()
                if self.now - self.since[server] <= TTL_S
            }
        self.perform(self.state.tick(self.now, expected, None))

    @precondition(lambda self: self.running is not None)
    @rule(
        failed=st.none() | st.sets(st.sampled_from("abcd")),
        ours=st.sampled_from([False, False, False, True]),
    )
    def transfer_ends(self, failed: set[str] | None, ours: bool) -> None:
        assert self.running is not None
        members = set(self.running.members)
        if failed is None:
            self.suspects -= members
        else:
            for server in members:
                self.known.pop(server, None)
            if not ours and not self.gives_way:
                self.suspects |= failed & members or members
        self.state.ended(self.now, failed, ours=ours)
        self.running, self.gives_way = None, False

    @invariant()
    def nobody_waits_for_ever(self) -> None:
        if self.waiting:
            assert self.state.busy


Interleavings.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestInterleavings = Interleavings.TestCase
