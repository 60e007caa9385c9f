"""Which refusals of the weights on offer end a run."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from broker.contract import wire
from learner.weights.refusals import AGREE_S, CheckOffer, OfferRefusals, identity_of

EPOCH = 3
OTHERS_S = 600.0


def server(
    name: str,
    kind: wire.RefusalKind | None = "layout",
    *,
    version: int = 0,
    epoch: int = EPOCH,
    served: int = -1,
    voucher: str = "",
    state: str = "",
) -> wire.Presence:
    """A living server that refuses a version, or with kind None serves one or none yet."""
    refusal = None
    if kind is not None:
        refusal = wire.OfferRefusal(
            epoch=epoch, version=version, kind=kind, difference=f"{kind} differs", loads=4
        )
    found = state or ("serving" if served >= 0 else "failed" if refusal is not None else "starting")
    return msgspec.convert(
        {
            "type": "Presence", "role": "rollout", "id": name, "host": "h", "pid": 1, "state": found,
            "epoch": epoch if served >= 0 else 0, "policy_version": served, "voucher": voucher,
            "refusal": refusal,
        },
        wire.Presence,
        from_attributes=True,
    )  # fmt: skip


def watch(version: int = 0) -> OfferRefusals:
    refusals = OfferRefusals(EPOCH, others_s=OTHERS_S)
    refusals.offered(version)
    return refusals


def joined(key: str) -> str:
    """A voucher made with the join token of this key."""
    return f"{key}.0.certificate.signature"


def test_one_server_never_ends_a_run_that_the_learner_finds_right() -> None:
    refusals = watch()
    check = refusals.look([server("a")], 0.0)
    assert check == CheckOffer("layout", 0, "a: layout differs")
    refusals.checked(check, "")
    assert [refusals.look([server("a")], float(now)) for now in range(0, 100_000, 1000)] == [
        None
    ] * 100
    assert refusals.verdict == ""


def test_learner_that_finds_the_fault_ends_it_at_once() -> None:
    refusals = watch()
    check = refusals.look([server("a")], 0.0)
    assert check is not None
    refusals.checked(check, "w float32[2] is in the offer, and not in the model")
    assert refusals.verdict == (
        "no server can load the weights, version 0 of epoch 3: a: layout differs; the learner confirms it: "
        "w float32[2] is in the offer, and not in the model; change model, train.lora or train.backend so that "
        "servers have tensors of the same names and shapes, and start the run again, which resumes it"
    )


def test_two_identities_end_it_after_a_while() -> None:
    refusals = watch(7)
    servers = [server("a", "logprobs", version=7), server("b", "logprobs", version=7)]
    assert refusals.look(servers, 1.0) == CheckOffer("logprobs", 7, "a: logprobs differs")
    refusals.look(servers, 1.0 + AGREE_S - 0.1)
    assert refusals.verdict == ""
    refusals.look(servers, 1.0 + AGREE_S)
    assert refusals.verdict.startswith(
        "no server can load the weights, version 7 of epoch 3: a: logprobs differs; b refused it too; change rollout."
    )


def test_identities_are_join_tokens() -> None:
    names = [
        identity_of(server("a", voucher=joined("K"))),
        identity_of(server("b", voucher=joined("K"))),
    ]
    assert names[0] == names[1] == "K"
    assert identity_of(server("a", voucher="c2lnbmF0dXJl")) == "id a"  # of the owner's user
    refusals = watch()
    same = [server(name, voucher=joined("K")) for name in "abcd"]
    for now in range(0, 10_000, 100):
        refusals.look(same, float(now))
    assert refusals.verdict == ""
    refusals.look([*same, server("e", voucher=joined("L"))], 10_000.0)
    refusals.look([*same, server("e", voucher=joined("L"))], 10_000.0 + AGREE_S)
    assert "b, c, d, e refused it too" in refusals.verdict


def test_different_reasons_do_not_confirm_each_other() -> None:
    refusals = watch()
    for now in range(0, 10_000, 100):
        refusals.look(
            [server("a", "layout"), server("b", "logprobs"), server("c", "base")], float(now)
        )
    assert refusals.verdict == ""


def test_server_that_serves_the_offer_proves_it() -> None:
    refusals = watch(5)
    two = [server("a", "logprobs", version=5), server("b", "logprobs", version=5)]
    for now in range(0, 10_000, 5):
        refusals.look([*two, server("c", None, served=5)], float(now))
    refusals.look(two, 10_000.0)
    refusals.look(two, 10_000.0 + AGREE_S - 1)
    assert refusals.verdict == ""
    refusals.look([*two, server("c", None, served=4)], 10_000.0 + AGREE_S)  # it may still load 5
    assert refusals.verdict == ""
    refusals.look([*two, server("c", None, served=4)], 10_000.0 + OTHERS_S)
    assert refusals.verdict


def test_any_version_of_the_epoch_proves_the_layout() -> None:
    refusals = watch(5)
    servers = [server("a"), server("b"), server("c", None, served=0)]
    for now in range(0, 10_000, 5):
        assert refusals.look(servers, float(now)) is None
    assert refusals.verdict == ""


def test_refusals_of_other_offers_count_for_nothing() -> None:
    refusals = watch(5)
    servers = [
        server("a", "logprobs", version=4), server("b", "logprobs", version=6),
        server("c", epoch=EPOCH - 1), server("d", epoch=EPOCH - 1), server("e", epoch=EPOCH + 1),
    ]  # fmt: skip
    for now in range(0, 10_000, 5):
        assert refusals.look(servers, float(now)) is None
    assert refusals.verdict == ""


def test_new_version_and_pause_begin_anew() -> None:
    refusals = watch(5)

    def two(version: int) -> list[wire.Presence]:
        return [server(name, "logprobs", version=version) for name in "ab"]

    refusals.look(two(5), 0.0)
    refusals.offered(6)
    refusals.look(two(6), AGREE_S)
    refusals.pause()
    refusals.look(two(6), 2 * AGREE_S)
    refusals.look(two(6), 3 * AGREE_S - 0.1)
    assert refusals.verdict == ""
    refusals.look(two(6), 3 * AGREE_S)
    assert refusals.verdict


def test_result_of_a_check_of_an_older_version_is_dropped() -> None:
    refusals = watch(5)
    check = refusals.look([server("a", "logprobs", version=5)], 0.0)
    assert check is not None
    refusals.offered(6)
    refusals.checked(check, "token 1 differs")
    assert refusals.verdict == ""


def test_leaving_servers_are_not_waited_for() -> None:
    refusals = watch()
    servers = [server("a"), server("b"), server("c", None, state="draining")]
    refusals.look(servers, 0.0)
    refusals.look(servers, AGREE_S)
    assert refusals.verdict


REPORTS = st.one_of(
    st.tuples(st.sampled_from(["layout", "base", "logprobs"]), st.integers(0, 2), st.just(-1)),
    st.tuples(st.none(), st.just(0), st.integers(-1, 2)),
)
EVENTS = st.one_of(
    st.tuples(st.just("report"), st.sampled_from("abcd"), REPORTS),
    st.tuples(st.just("leave"), st.sampled_from("abcd"), st.none()),
    st.tuples(st.just("wait"), st.integers(1, 30), st.none()),
    st.tuples(st.just("offer"), st.none(), st.none()),
)
TOKENS = {"a": joined("K"), "b": joined("K"), "c": joined("L"), "d": ""}


@given(st.lists(EVENTS, max_size=60))
def test_nothing_ends_a_run_but_two_lasting_identities(
    events: list[tuple[str, object, object]],
) -> None:
    """Whatever servers say in whatever order, with a learner that finds no fault."""
    refusals, now, version, alive = watch(), 0.0, 0, dict[str, wire.Presence]()
    since: dict[tuple[str, str], float] = {}  # (identity, kind) of refusals that no look has missed
    for event, name, report in events:
        if event == "report":
            kind, refused, served = report  # type: ignore[misc]
            alive[str(name)] = server(
                str(name), kind, version=refused, served=served, voucher=TOKENS[str(name)]
            )
        elif event == "leave":
            alive.pop(str(name), None)
        elif event == "wait":
            now += float(str(name))
        else:
            version += 1
            refusals.offered(version)
            since = {}
        check = refusals.look(alive.values(), now)
        if check is not None:
            refusals.checked(check, "")
        current = {
            (TOKENS[one.id] or one.id, one.refusal.kind)
            for one in alive.values()
            if one.refusal is not None
            and (one.refusal.kind != "logprobs" or one.refusal.version == version)
        }
        since = {key: since.get(key, now) for key in current}
        lasting = [kind for (_, kind), begin in since.items() if now - begin >= AGREE_S]
        if refusals.verdict:
            assert max(lasting.count(kind) for kind in lasting) >= 2
            assert all(
                one.refusal is not None or one.policy_version < version for one in alive.values()
            )
            return
