"""What a server does about offers: order, adoption, retries."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from broker import wire
from broker.weights.acceptance import FIRST_RETRY_S, LAST_RETRY_S, Acceptance, Adopt, Join, Wait
from broker.weights.probe import make_probe


def offer(epoch: int, version: int, *, digest: str = "", plan: str = "p") -> wire.WeightsOffer:
    return wire.WeightsOffer(
        epoch=epoch,
        version=version,
        digest=digest or f"{epoch}/{version}",
        plan=plan,
        size_bytes=1,
        backend="gloo",
        probe=make_probe([1, 2], [-1.0], tolerance=0.1),
    )


def test_joins_what_is_new_and_rests_when_it_is_served() -> None:
    state = Acceptance("p", None)
    assert state.next(0.0) == Wait(None)
    assert state.offered(offer(1, 3)) == ""
    assert state.next(0.0) == Join(offer(1, 3))
    state.loading()
    state.taken(offer(1, 3))
    assert state.served == (1, 3)
    assert state.next(0.0) == Wait(None)


def test_older_offers_are_refused_and_epochs_go_before_versions() -> None:
    state = Acceptance("p", None)
    state.offered(offer(2, 5))
    assert state.offered(offer(2, 4)) == "epoch 2 version 4 is not newer than epoch 2 version 5"
    assert state.offered(offer(1, 9)) == "epoch 1 version 9 is not newer than epoch 2 version 5"
    assert state.offered(offer(2, 5, digest="other")) == "epoch 2 version 5 is not newer than epoch 2 version 5"
    assert state.offered(offer(2, 5)) == ""  # the same again, after a reconnection
    assert state.offered(offer(3, 1)) == ""
    assert state.next(0.0) == Join(offer(3, 1))


def test_matching_digest_is_adopted() -> None:
    state = Acceptance("p", "same")
    state.offered(offer(1, 7, digest="same"))
    assert state.next(0.0) == Adopt(offer(1, 7, digest="same"))
    state.loading()
    state.taken(offer(1, 7, digest="same"))
    state.offered(offer(2, 7, digest="same"))  # the learner came back
    assert state.next(0.0) == Adopt(offer(2, 7, digest="same"))


def test_failed_loading_leaves_nothing_to_adopt() -> None:
    state = Acceptance("p", "same")
    state.offered(offer(1, 0, digest="same"))
    state.loading()
    state.failed(0.0)
    assert state.next(1.0) == Join(offer(1, 0, digest="same"))
    assert state.failures == 1


def test_retries_are_spaced_and_a_new_offer_resets_them() -> None:
    state = Acceptance("p", None)
    state.offered(offer(1, 0))
    now, delays = 0.0, []
    for _ in range(9):
        delays.append(state.failed(now))
        assert state.next(now) == Wait(now + delays[-1])
        now += delays[-1]
        assert state.next(now) == Join(offer(1, 0))
    assert delays[:3] == [FIRST_RETRY_S, 2 * FIRST_RETRY_S, 4 * FIRST_RETRY_S]
    assert delays[-1] == LAST_RETRY_S
    state.failed(now, counts=False)
    assert state.failures == 9
    state.offered(offer(1, 1))
    assert state.next(now) == Join(offer(1, 1))


def test_another_model_is_refused_until_the_right_one_is_offered() -> None:
    state = Acceptance("p", None)
    assert state.offered(offer(1, 0, plan="q")) == "epoch 1 version 0 is another model"
    assert state.next(0.0) == Wait(None)
    assert state.offered(offer(2, 0)) == ""
    assert state.next(0.0) == Join(offer(2, 0))


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4), st.sampled_from(["ok", "fail", "busy"])), max_size=30))
def test_served_version_never_goes_back(events: list[tuple[int, int, str]]) -> None:
    state, now, before = Acceptance("p", None), 0.0, (0, -1)
    for epoch, version, outcome in events:
        state.offered(offer(epoch, version))
        now += 10.0
        action = state.next(now)
        if isinstance(action, Wait):
            continue
        state.loading()
        if outcome == "ok":
            state.taken(action.offer)
        else:
            state.failed(now, counts=outcome == "fail")
        assert state.served >= before
        before = state.served
    assert state.newest is None or (state.newest.epoch, state.newest.version) >= state.served
