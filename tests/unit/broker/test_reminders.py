"""How often a wait is mentioned."""

from __future__ import annotations

from broker.system.reminders import Reminders


def test_intervals_grow_to_five_minutes() -> None:
    reminders = Reminders()
    said = [now for now in range(2000) if reminders.due(float(now))]
    assert said == [0, 5, 15, 35, 75, 155, 315, 615, 915, 1215, 1515, 1815]


def test_a_wait_that_is_over_begins_again() -> None:
    reminders = Reminders()
    assert [reminders.due(float(now)) for now in range(6)] == [
        True,
        False,
        False,
        False,
        False,
        True,
    ]
    assert reminders.said
    reminders.over()
    assert not reminders.said
    assert [reminders.due(float(now)) for now in range(6, 12)] == [
        True,
        False,
        False,
        False,
        False,
        True,
    ]
