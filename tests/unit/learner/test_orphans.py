"""Which tickets that left their queue are lost, and which are in flight."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from learner.credit.orphans import OrphanDetector

EMPTY = (1, 0)


def test_a_ticket_without_a_group_anywhere_is_lost_after_the_grace_time() -> None:
    orphans = OrphanDetector(pools=2, grace_s=15.0)
    found = [
        orphans.look(now, [7], EMPTY, log_end=3, position=3) for now in (0.0, 5.0, 10.0, 15.0, 20.0)
    ]
    assert found == [[], [], [], [7], []]


def test_what_the_learner_has_not_read_is_not_lost() -> None:
    orphans = OrphanDetector(pools=0, grace_s=0.0)
    assert orphans.look(0.0, [7], EMPTY, log_end=5, position=4) == []
    assert orphans.look(1.0, [7], EMPTY, log_end=9, position=4) == []
    assert orphans.look(2.0, [7], EMPTY, log_end=9, position=5) == [7], (
        "waits for records that came after it had gone"
    )


def test_a_group_that_is_being_scored_is_not_lost() -> None:
    orphans = OrphanDetector(pools=1, grace_s=0.0)
    for now in range(9):
        assert orphans.look(float(now), [7], (4, 4 + now), log_end=0, position=0) == []
    assert orphans.look(9.0, [7], (5, 20), log_end=1, position=0) == []
    assert orphans.look(10.0, [7], (21, 30), log_end=1, position=0) == []
    assert orphans.look(11.0, [7], (22, 30), log_end=1, position=1) == [7]


def test_a_ticket_that_comes_back_to_its_queue_starts_again() -> None:
    orphans = OrphanDetector(pools=0, grace_s=10.0)
    assert orphans.look(0.0, [7], EMPTY, 0, 0) == []
    assert orphans.look(9.0, [], EMPTY, 0, 0) == []
    assert orphans.look(12.0, [7], EMPTY, 0, 0) == []
    assert orphans.look(22.0, [7], EMPTY, 0, 0) == [7]


@settings(max_examples=300)
@given(
    moves=st.lists(
        st.sampled_from(["other in", "other out", "mine on", "look", "read"]), max_size=80
    ),
    pools=st.integers(0, 3),
)
def test_no_group_in_flight_is_ever_lost_and_a_lost_one_is_always_found(
    moves: Sequence[str], pools: int
) -> None:
    """A group goes through as many reward queues as there are pools and then into the log, among
    others that come and go.
    """
    queue: list[tuple[int, str]] = [(1, "mine")] if pools else []
    last, log_end, position, left = len(queue), 0, 0, pools
    mine_at = 0  # its place in the log
    if not pools:
        log_end = mine_at = 1
    orphans = OrphanDetector(pools, grace_s=0.0)
    now = 0.0
    for move in moves:
        if move == "other in":
            last += 1
            queue.append((last, "other"))
        elif move == "other out":
            other = next((one for one in queue if one[1] == "other"), None)
            if other:
                queue.remove(other)
                log_end += 1
        elif move == "mine on" and left:
            left -= 1
            if left:
                last += 1
                queue.append((last, "mine"))  # stored in the next queue before it leaves this one
                queue.remove(next(one for one in queue if one[1] == "mine"))
            else:
                log_end += 1
                mine_at = log_end
                queue.remove(next(one for one in queue if one[1] == "mine"))
        elif move == "read":
            position = log_end
        now += 1
        waits = not mine_at or position < mine_at
        if move == "look" and waits:
            scoring = (queue[0][0], last) if queue else (last + 1, last)
            assert orphans.look(now, [7], scoring, log_end, position) == []
    found = [
        orphans.look(now + i, [8], (last + 1, last), log_end, log_end) for i in range(pools + 2)
    ]
    assert [number for some in found for number in some] == [8]
