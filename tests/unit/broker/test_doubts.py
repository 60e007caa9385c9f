"""When a connected server that gives no answers is left for another."""

from __future__ import annotations

from broker.nats.server_health import ServerHealth


def test_silence_for_eight_seconds_is_enough() -> None:
    doubts = ServerHealth()
    assert [
        doubts.doubt("a", now, waited)
        for now, waited in [(2.0, 2.0), (5.0, 3.0), (7.9, 2.9), (8.0, 0.1)]
    ] == [
        False,
        False,
        False,
        True,
    ]


def test_answers_to_other_requests_do_not_hide_one_that_has_none() -> None:
    """A server that is cut off still answers for streams whose leader it was."""
    doubts = ServerHealth()
    for now in (5.0, 6.0, 7.0):
        assert not doubts.doubt("store tickets", now, 5.0 if now == 5.0 else 0.0)
        doubts.trust("STREAM.INFO.tickets")
    assert doubts.doubt("store tickets", 10.0, 5.0)


def test_an_answer_ends_the_doubt() -> None:
    doubts = ServerHealth()
    assert not doubts.doubt("a", 5.0, 5.0)
    doubts.trust("a")
    assert not doubts.doubt("a", 10.0, 5.0)
    assert doubts.doubt("a", 13.0, 3.0)


def test_what_nobody_asks_any_more_does_not_count() -> None:
    doubts = ServerHealth()
    assert not doubts.doubt("a", 2.0, 2.0)
    assert not doubts.doubt("a", 60.0, 2.0)


def test_a_leader_missing_everywhere_makes_it_move_less_often() -> None:
    doubts = ServerHealth()
    assert doubts.doubt("a", 8.0, 8.0)
    doubts.moved(8.0)
    assert not doubts.doubt("a", 20.0, 8.0)
    assert not doubts.doubt("a", 27.0)
    assert doubts.doubt("a", 28.0)
    doubts.moved(28.0)
    assert not doubts.doubt("a", 95.0, 5.0)
    assert doubts.doubt("a", 98.0)
