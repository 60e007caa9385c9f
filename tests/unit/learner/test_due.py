"""When a checkpoint is due, and how long a refusing folder is waited for."""

from __future__ import annotations

import pytest

from broker.system.reminders import FIRST_S
from learner.checkpoints.checkpoint_schedule import CheckpointSchedule
from learner.disk_retry import RetryBackoff


def steps_due(due: CheckpointSchedule, ends: list[float]) -> list[int]:
    """Steps after which a checkpoint is taken, if each is taken at once; ``ends`` are the times at
    which steps 1, 2 … end.
    """
    taken = []
    for step, now in enumerate(ends, start=1):
        due.completed(step, now, failing=False)
        if due.due:
            due.taken(now)
            taken.append(step)
    return taken


@pytest.mark.parametrize(
    ("every_steps", "every_s", "taken"),
    [
        (0, 0.0, []),
        (3, 0.0, [3, 6, 9]),
        (0, 25.0, [3, 6, 9]),  # ten seconds a step: 30, 60, 90
        (4, 25.0, [3, 4, 7, 8]),  # 30 by the clock, 40 by the step, 70 by the clock, 80 by the step
    ],
)
def test_either_triggers(every_steps: int, every_s: float, taken: list[int]) -> None:
    assert (
        steps_due(
            CheckpointSchedule(every_steps, every_s, 0.0, 2), [10.0 * step for step in range(1, 10)]
        )
        == taken
    )


def test_one_that_cannot_be_taken_stays_due_and_counts_once() -> None:
    due = CheckpointSchedule(2, 0.0, 0.0, 2)
    for step in (1, 2, 3, 4, 5):
        due.completed(step, 10.0 * step, failing=False)
        assert due.due == (step >= 2)
    assert (due.missed, due.must_wait(failing=False)) == (0, False)  # slow is not failing
    due.taken(50.0)
    assert not due.due


def test_training_runs_on_as_far_as_checkpoints_are_kept() -> None:
    due = CheckpointSchedule(2, 0.0, 0.0, ahead=2)
    waits = []
    for step in range(1, 7):
        due.completed(step, float(step), failing=True)
        waits.append(due.must_wait(failing=True))
    assert waits == [False, False, False, True, True, True]  # two fell due: at 2 and 4
    assert not due.must_wait(failing=False)
    due.completed(7, 7.0, failing=False)
    assert due.missed == 0


def test_by_the_clock_one_falls_due_each_interval_while_none_is_taken() -> None:
    due = CheckpointSchedule(0, 60.0, 0.0, ahead=2)
    for step in range(1, 13):
        due.completed(step, 10.0 * step, failing=True)
    assert due.missed == 2


def test_waits_double_up_to_a_limit_and_begin_anew() -> None:
    backoff = RetryBackoff()
    assert [backoff.failed("full", float(n))[0] for n in range(7)] == [
        0.5,
        1.0,
        2.0,
        4.0,
        8.0,
        10.0,
        10.0,
    ]
    backoff.worked()
    assert backoff.failed("full", 7.0)[0] == 0.5


def test_a_reason_is_said_once_and_again_after_a_while() -> None:
    backoff = RetryBackoff()
    said = [
        backoff.failed(reason, now)[1]
        for reason, now in (("full", 1.0), ("full", 2.0), ("denied", 3.0), ("denied", 4.0))
    ]
    assert said == [True, False, True, False]
    assert backoff.failed("denied", 3.0 + FIRST_S)[1]
