"""How much of the broker's store a run may fill."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from learner.credit.store_budget import ADMIT_BELOW, FIRST_GUESS_BYTES, StoreBudget, StoreUsage
from learner.credit.store_gate import replica_usage

MIB = 1 << 20


def usage(
    run: int, groups: int, *, others: int = 0, limit: int | None = None, stores: bool = True
) -> StoreUsage:
    """In MiB."""
    return StoreUsage(
        (run + others) * MIB, run * MIB, groups, None if limit is None else limit * MIB, stores
    )


def admitted(room: StoreBudget, at_most: int = 10_000) -> int:
    return next((count for count in range(at_most) if not room.admit()), at_most)


def room(limit: int | None = None, press_from: int = 800) -> StoreBudget:
    return StoreBudget(None if limit is None else limit * MIB, press_from * MIB)


def test_tickets_wait_where_their_groups_would_fill_the_store() -> None:
    one = room(100)
    # 2 MiB a group: 40 there, 10 expected, 80 allowed
    one.look(usage(run=40, groups=20), under_way=5)
    assert admitted(one) == 15
    one.look(usage(run=62, groups=31), under_way=9)
    assert admitted(one) == 0
    assert one.pressed
    assert not one.relaxed
    one.look(usage(run=10, groups=5), under_way=10)  # trimmed
    assert admitted(one) == 25
    one.look(usage(run=10, groups=5), under_way=29)
    assert one.relaxed


def test_what_others_hold_is_not_ours_to_fill() -> None:
    one = room(100)
    # half of it is left to the run: 40 may be filled
    one.look(usage(run=10, groups=10, others=50), under_way=0)
    assert admitted(one) == 30
    assert not one.pressed
    one.look(usage(run=31, groups=31, others=50), under_way=0)
    assert one.pressed


def test_the_smallest_limit_counts() -> None:
    one = room(1000)
    one.look(usage(run=10, groups=10, limit=100), under_way=0)
    assert one.limit == 100 * MIB
    assert admitted(one) == 70


def test_before_any_group_was_seen_a_size_is_assumed_and_the_last_one_is_remembered() -> None:
    one = room(100)
    assert admitted(one, 200) == 80 * MIB // FIRST_GUESS_BYTES
    one.look(usage(run=40, groups=10), under_way=0)
    one.look(usage(run=0, groups=0), under_way=0)  # everything was trimmed
    assert admitted(one) == 20


def test_one_is_always_under_way() -> None:
    one = room(100)
    one.look(usage(run=99, groups=3), under_way=0)
    assert admitted(one) == 1
    one.look(usage(run=99, groups=3), under_way=1)
    assert admitted(one) == 0


def test_none_is_under_way_while_a_full_step_is_trained() -> None:
    one = room(100)
    one.look(usage(run=99, groups=3), under_way=0)
    assert not one.admit(needed=False)
    one.look(usage(run=40, groups=20), under_way=0)
    assert one.admit(needed=False)


def test_without_any_limit_no_ticket_waits_but_checkpoints_come() -> None:
    one = room(None, press_from=100)
    one.look(usage(run=59, groups=59), under_way=10**6)
    assert admitted(one, 100) == 100
    assert not one.pressed
    one.look(usage(run=61, groups=59), under_way=0)
    assert one.pressed
    assert admitted(one, 100) == 100


def test_a_refusal_tells_the_limit_and_a_larger_store_takes_it_back() -> None:
    one = room(None, press_from=1000)
    one.look(usage(run=90, groups=90, others=10, stores=False), under_way=5)
    assert one.limit == 100 * MIB
    assert one.pressed
    assert admitted(one) == 0
    one.look(usage(run=20, groups=20, others=10), under_way=5)
    assert one.limit == 100 * MIB
    assert admitted(one) == 47  # 0.8 * 90 - 20 - 5
    one.look(usage(run=120, groups=120, others=10), under_way=5)
    assert one.limit is None


def test_a_store_that_others_fill_leaves_one_at_a_time() -> None:
    one = room(100)
    one.look(usage(run=1, groups=1, others=120), under_way=0)
    assert one.pressed
    assert admitted(one) == 1


@given(
    limit=st.integers(1, 10**6),
    run=st.integers(1, 10**6),
    others=st.integers(0, 10**6),
    groups=st.integers(1, 1000),
    under_way=st.integers(0, 1000),
)
def test_what_is_admitted_fits(
    limit: int, run: int, others: int, groups: int, under_way: int
) -> None:
    one = StoreBudget(limit, limit)
    one.look(StoreUsage(run + others, run, groups, None), under_way)
    count = admitted(one, 20_000)
    if count > 1 or (count == 1 and under_way):
        assert (
            run + (under_way + count) * run / groups <= ADMIT_BELOW * max(limit - others, 0) + 1e-6
        )
    assert count >= 1 or under_way


def test_the_size_of_groups_is_known_from_eight_of_them_and_stays_so_when_they_are_trimmed() -> (
    None
):
    one, known = StoreBudget(10**9, 10**9), list[bool]()
    for groups in (0, 1, 7, 8, 1):  # one may be no more than its closing
        one.look(StoreUsage(391 * groups, 391 * groups, groups, None), 0)
        known.append(one.measured)
    assert known == [False, False, False, True, True]


def test_an_account_counts_every_replica_and_a_tier_limits_one() -> None:
    flat = {"storage": 900, "limits": {"max_storage": 3000}}
    assert replica_usage(flat, 1) == (900, 3000)
    assert replica_usage(flat, 3) == (300, 1000)
    tiers = {
        "storage": 990,
        "limits": {"max_storage": 0},
        "tiers": {"R3": {"storage": 900, "limits": {"max_storage": 1000}}},
    }
    assert replica_usage(tiers, 3) == (300, 1000)
    assert replica_usage({"storage": 9, "limits": {"max_storage": -1}}, 1) == (9, None)
