"""What a server does about offers: order, adoption, retries."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from broker.contract import wire
from broker.weights.probe import make_probe
from broker.weights.receiver.acceptance import (
    FIRST_LOOK_S,
    FIRST_RETRY_S,
    LAST_RETRY_S,
    LOOK_EVERY_S,
    OLD,
    QUIET_LOADS,
    AdoptVersion,
    CheckSnapshot,
    JoinTransfer,
    OfferAcceptance,
    WaitForOffer,
)


def offer(epoch: int, version: int, *, digest: str = "", plan: str = "p") -> wire.WeightsOffer:
    return wire.WeightsOffer(
        epoch=epoch,
        version=version,
        digest=digest or f"{epoch}/{version}",
        plan=plan,
        size_bytes=1,
        carriers=["gloo"],
        probe=make_probe([1, 2], [-1.0], tolerance=0.1),
    )


def test_joins_what_is_new_and_rests_when_it_is_served() -> None:
    state = OfferAcceptance("p", None)
    assert state.next(0.0) == WaitForOffer(None)
    assert state.offered(offer(1, 3)) == ""
    assert state.next(0.0) == JoinTransfer(offer(1, 3))
    state.loading()
    state.taken(offer(1, 3), offer(1, 3).digest)
    assert state.served == (1, 3)
    assert state.next(0.0) == WaitForOffer(None)


def test_older_offers_are_refused_and_epochs_go_before_versions() -> None:
    state = OfferAcceptance("p", None)
    state.offered(offer(2, 5))
    assert state.offered(offer(2, 4)) == "epoch 2 version 4 is not newer than epoch 2 version 5"
    assert state.offered(offer(1, 9)) == "epoch 1 version 9 is not newer than epoch 2 version 5"
    assert (
        state.offered(offer(2, 5, digest="other"))
        == "epoch 2 version 5 is not newer than epoch 2 version 5"
    )
    assert state.offered(offer(2, 5)) == ""  # the same again, after a reconnection
    assert state.offered(offer(3, 1)) == ""
    assert state.next(0.0) == JoinTransfer(offer(3, 1))


def test_matching_digest_is_adopted() -> None:
    state = OfferAcceptance("p", "same")
    state.offered(offer(1, 7, digest="same"))
    assert state.next(0.0) == AdoptVersion(offer(1, 7, digest="same"))
    state.loading()
    state.taken(offer(1, 7, digest="same"), "same")
    state.offered(offer(2, 7, digest="same"))  # the learner came back
    assert state.next(0.0) == AdoptVersion(offer(2, 7, digest="same"))


def test_an_offer_without_its_digest_is_joined_and_completed_later() -> None:
    early = msgspec.structs.replace(offer(1, 7), digest="")
    state = OfferAcceptance("p", "held")
    assert state.offered(early) == ""
    assert state.next(0.0) == JoinTransfer(early)
    state.failed(0.0)
    assert state.offered(offer(1, 7)) == ""
    assert state.next(0.0) == WaitForOffer(FIRST_RETRY_S)  # the same version: no reason to hurry
    assert state.next(FIRST_RETRY_S) == JoinTransfer(offer(1, 7))
    state.taken(offer(1, 7), "1/7")
    assert state.offered(early) == "epoch 1 version 7 is not newer than epoch 1 version 7"
    assert state.next(9.0) == WaitForOffer(None)


def test_what_was_served_before_its_digest_was_told_is_known_by_it() -> None:
    early = msgspec.structs.replace(offer(1, 7), digest="")
    state = OfferAcceptance("p", None)
    state.offered(early)
    state.loading()
    state.taken(early, "1/7")
    state.offered(offer(1, 7))
    assert state.next(0.0) == WaitForOffer(None)
    state.offered(offer(2, 7, digest="1/7"))  # the next learner's
    assert state.next(0.0) == AdoptVersion(offer(2, 7, digest="1/7"))


def test_failed_loading_leaves_nothing_to_adopt() -> None:
    state = OfferAcceptance("p", "same")
    state.offered(offer(1, 0, digest="same"))
    state.loading()
    state.failed(0.0)
    assert state.next(1.0) == JoinTransfer(offer(1, 0, digest="same"))
    assert state.failures == 1


def test_retries_are_spaced_and_a_new_offer_resets_them() -> None:
    state = OfferAcceptance("p", None)
    state.offered(offer(1, 0))
    now, delays = 0.0, []
    for _ in range(9):
        delays.append(state.failed(now))
        assert state.next(now) == WaitForOffer(now + delays[-1])
        now += delays[-1]
        assert state.next(now) == JoinTransfer(offer(1, 0))
    assert delays[:3] == [FIRST_RETRY_S, 2 * FIRST_RETRY_S, 4 * FIRST_RETRY_S]
    assert delays[-1] == LAST_RETRY_S
    state.failed(now, counts=False)
    assert state.failures == 9
    state.offered(offer(1, 1))
    assert state.next(now) == JoinTransfer(offer(1, 1))


def test_another_model_is_refused_until_the_right_one_is_offered() -> None:
    state = OfferAcceptance("p", None)
    assert state.offered(offer(1, 0, plan="q")) == "epoch 1 version 0 is another model"
    assert state.next(0.0) == WaitForOffer(None)
    assert state.offered(offer(2, 0)) == ""
    assert state.next(0.0) == JoinTransfer(offer(2, 0))


def fail_load(
    state: OfferAcceptance, made: wire.WeightsOffer, difference: str = "token 1 differs"
) -> None:
    state.loading()
    state.failed(0.0, offer=made, difference=difference)


def test_load_that_fails_more_than_three_times_is_told() -> None:
    state = OfferAcceptance("p", None)
    state.offered(offer(1, 3))
    for _ in range(QUIET_LOADS):
        fail_load(state, offer(1, 3))
        assert (state.refusal, state.repeats_loads) == (None, False)
    fail_load(state, offer(1, 3))
    assert state.repeats_loads
    assert state.refusal == wire.OfferRefusal(
        epoch=1, version=3, kind="logprobs", difference="token 1 differs", loads=4
    )
    # a transfer that broke before the load says nothing about it
    state.failed(0.0, offer=offer(1, 3))
    assert (state.failed_loads, state.refusal is not None) == (4, True)
    fail_load(state, offer(1, 3), "")  # out of memory, say: repeated, but no fault of the offer
    assert (state.failed_loads, state.refusal) == (5, None)
    fail_load(state, offer(1, 3))
    state.offered(offer(1, 4))
    assert (state.failed_loads, state.refusal) == (0, None)
    fail_load(state, offer(1, 3))  # of an older version, as a snapshot
    assert state.failed_loads == 0


def test_served_version_ends_a_refusal() -> None:
    state = OfferAcceptance("p", None)
    state.offered(offer(1, 3))
    for _ in range(QUIET_LOADS + 1):
        fail_load(state, offer(1, 3))
    state.loading()
    state.taken(offer(1, 3), "d")
    assert (state.failed_loads, state.refusal, state.repeats_loads) == (0, None, False)


def test_another_model_is_told_at_once_and_the_text_is_bounded() -> None:
    state = OfferAcceptance("p", None)
    state.offered(other := offer(1, 3, plan="q"))
    state.refuse(other, "layout", "x" * 10_000)
    assert state.refusal is not None
    assert (state.refusal.kind, state.refusal.loads, len(state.refusal.difference)) == (
        "layout",
        0,
        512,
    )
    newer = offer(1, 4, plan="q")
    state.refuse(newer, "layout", "y")  # not the newest: explained after the next came
    assert state.refusal.version == 3


@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.integers(0, 4), st.sampled_from(["ok", "fail", "busy"])),
        max_size=30,
    )
)
@settings(deadline=None)
def test_served_version_never_goes_back(events: list[tuple[int, int, str]]) -> None:
    state, now, before = OfferAcceptance("p", None), 0.0, (0, -1)
    for epoch, version, outcome in events:
        state.offered(offer(epoch, version))
        now += 10.0
        action = state.next(now)
        if isinstance(action, WaitForOffer):
            continue
        state.loading()
        if outcome == "ok":
            state.taken(action.offer, action.offer.digest)
        else:
            state.failed(now, counts=outcome == "fail")
        assert state.served >= before
        before = state.served
    assert state.newest is None or (state.newest.epoch, state.newest.version) >= state.served


class Interleavings(RuleBasedStateMachine):
    """A server under learners that come, go and wake up again, with attempts that offers overtake,
    and restarts of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        # digest of what the engine really holds, None while half of it is overwritten
        self.bytes: str | None = "0"
        self.versions: dict[int, int] = {1: -1}  # epoch: newest version it has offered
        self.published: list[wire.WeightsOffer] = []
        self.attempt: AdoptVersion | JoinTransfer | None = None
        self.loading = False
        self.start()

    def start(self) -> None:
        self.state = OfferAcceptance("p", self.bytes)
        self.seen: list[wire.WeightsOffer] = []
        self.floor = (0, -1)

    def deliver(self, made: wire.WeightsOffer) -> None:
        best = max(((one.epoch, one.version) for one in self.seen), default=(0, -1))
        refused = self.state.offered(made)
        self.seen.append(made)
        newest = self.state.newest
        assert newest is not None
        assert (newest.epoch, newest.version) == max(best, (made.epoch, made.version)), (
            "ordered by epoch, then version"
        )
        if (made.epoch, made.version) > best:
            assert bool(refused) == (made.plan != "p")

    # ------------------------------------------------------------------------------------------ the
    # world

    @rule(
        epoch_after=st.integers(0, 1),
        behind=st.integers(0, 2),
        digest=st.sampled_from("0123"),
        plan=st.sampled_from("ppppq"),
    )
    def learner_offers(self, epoch_after: int, behind: int, digest: str, plan: str) -> None:
        """The newest learner goes on; or a new one does, from a checkpoint that may be older. Equal
        bytes may come again.
        """
        newest = max(self.versions)
        if epoch_after:
            self.versions[newest + 1] = max(-1, self.versions[newest] - behind)
            newest += 1
        self.versions[newest] += 1
        made = offer(newest, self.versions[newest], digest=digest, plan=plan)
        self.published.append(made)
        self.deliver(made)

    @precondition(lambda self: self.published)
    @rule(pick=st.integers(0, 50))
    def offer_comes_again(self, pick: int) -> None:
        """After a reconnection, or from a learner that was frozen and does not know yet that it was
        succeeded.
        """
        self.deliver(self.published[pick % len(self.published)])

    @rule(seconds=st.floats(0.01, 6.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def server_restarts(self) -> None:
        """With the weights of its model folder, or of nobody knows what; the newest offer comes at
        once.
        """
        self.bytes, self.attempt, self.loading = "0", None, False
        self.start()
        if self.published:
            self.deliver(max(self.published, key=lambda one: (one.epoch, one.version)))

    # ------------------------------------------------------------------------------------------ the
    # server

    @precondition(lambda self: self.attempt is None)
    @rule()
    def look(self) -> None:
        action, newest = self.state.next(self.now), self.state.newest
        if isinstance(action, WaitForOffer):
            if action.until is None:
                assert (
                    newest is None
                    or newest.plan != "p"
                    or (newest.epoch, newest.version) == self.state.served
                )
            else:
                assert self.now < action.until <= self.now + LAST_RETRY_S
            return
        assert action.offer is newest, "whatever is older is not worth an attempt"
        assert newest.plan == "p"
        assert (newest.epoch, newest.version) > self.state.served
        assert isinstance(action, AdoptVersion) == (newest.digest == self.bytes), (
            "a transfer exactly where the bytes are others"
        )
        self.attempt = action

    @precondition(lambda self: isinstance(self.attempt, JoinTransfer) and not self.loading)
    @rule(busy=st.booleans())
    def transfer_fails(self, busy: bool) -> None:
        before = self.state.failures
        assert FIRST_RETRY_S <= self.state.failed(self.now, counts=not busy) <= LAST_RETRY_S
        assert self.state.failures == before + (not busy)
        self.attempt = None

    @precondition(lambda self: self.attempt is not None and not self.loading)
    @rule()
    def loading_begins(self) -> None:
        self.state.loading()
        self.loading, self.bytes = True, None

    @precondition(lambda self: self.loading)
    @rule(probe_matches=st.booleans())
    def loading_ends(self, probe_matches: bool) -> None:
        assert self.attempt is not None
        if probe_matches:
            self.bytes = self.attempt.offer.digest
            self.state.taken(self.attempt.offer, self.attempt.offer.digest)
            assert self.state.served == (self.attempt.offer.epoch, self.attempt.offer.version)
            assert self.state.digest == self.bytes, "the same bytes offered again need no transfer"
        else:
            self.state.failed(self.now)
        self.attempt, self.loading = None, False

    # ------------------------------------------------------------------------------------------
    # what holds

    @invariant()
    def never_back_and_never_other_bytes(self) -> None:
        assert self.state.served >= self.floor
        self.floor = self.state.served
        assert self.state.digest in (None, self.bytes)
        if self.floor > (0, -1):
            assert self.floor in {(one.epoch, one.version) for one in self.seen if one.plan == "p"}

    def teardown(self) -> None:
        """Left alone with a learner that answers, it serves the newest after one wait at most."""
        if self.loading:
            self.loading_ends(True)
        self.attempt = None
        self.now += LAST_RETRY_S
        self.look()
        if self.attempt is not None:
            self.loading_begins()
            self.loading_ends(True)
        newest = self.state.newest
        if newest is not None and newest.plan == "p":
            assert self.state.served == (newest.epoch, newest.version)


Interleavings.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestInterleavings = Interleavings.TestCase


def test_snapshots_are_looked_at_while_the_learner_cannot_be_had() -> None:
    state = OfferAcceptance("p", None, "fallback")
    assert state.next(0.0) == WaitForOffer(FIRST_LOOK_S)
    state.offered(offer(1, 20))
    assert state.next(0.5) == JoinTransfer(offer(1, 20))
    assert state.failed(0.5) == FIRST_RETRY_S
    assert state.next(0.55) == WaitForOffer(0.6)  # the learner once more, then the snapshots
    assert state.next(0.6) == JoinTransfer(offer(1, 20))
    state.failed(1.0)
    assert state.next(1.0) == CheckSnapshot()
    assert state.useful(offer(1, 16)) == ""
    state.loading()
    state.taken(offer(1, 16), "d16")
    state.looked(1.1)
    assert state.served == (1, 16)
    assert state.next(1.2) == JoinTransfer(offer(1, 20))
    assert state.useful(offer(1, 16)) == OLD
    state.failed(1.2)
    assert state.next(1.4) == JoinTransfer(offer(1, 20))
    state.failed(1.4)
    assert isinstance(state.next(1.4), WaitForOffer)
    assert state.next(1.1 + LOOK_EVERY_S) != WaitForOffer(None)


def test_with_snapshots_only_the_learner_is_never_asked() -> None:
    state = OfferAcceptance("p", "d0", "only")
    state.offered(offer(1, 20))
    assert state.next(0.0) == WaitForOffer(FIRST_LOOK_S)
    assert state.next(FIRST_LOOK_S) == CheckSnapshot()
    state.looked(FIRST_LOOK_S)
    assert state.next(FIRST_LOOK_S) == WaitForOffer(FIRST_LOOK_S + LOOK_EVERY_S)
    state.offered(offer(1, 21, digest="d0"))
    assert state.next(2.0) == AdoptVersion(offer(1, 21, digest="d0"))


def test_snapshots_of_no_use() -> None:
    state = OfferAcceptance("p", None, "fallback")
    assert (
        state.useful(offer(1, 3, plan="q"))
        == "epoch 1 version 3 is another model than the one here"
    )
    state.offered(offer(2, 20))
    assert state.useful(offer(1, 20)) == ""
    assert state.useful(offer(1, 21)) == "epoch 1 version 21 was overtaken by epoch 2 version 20"
    assert state.useful(offer(2, 22)) == ""  # the offer is on its way
    state.taken(offer(2, 20), "d")
    assert state.useful(offer(2, 20)) == state.useful(offer(1, 20)) == OLD
