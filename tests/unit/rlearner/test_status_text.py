"""What ``rlearner status`` prints: one screen, at any width."""

from __future__ import annotations

from rlearner.ops.status import missing_learner_lines, wrap_lines


def test_what_does_not_fit_goes_below_the_second_column() -> None:
    line = "  figures      reward/mean 0.3457, env/success_rate 0.5, staleness/max 2"
    assert wrap_lines([line], 80) == [line]
    assert wrap_lines([line], 50) == [
        "  figures      reward/mean 0.3457,",
        "               env/success_rate 0.5, staleness/max",
        "               2",
    ]


def test_an_id_or_a_path_is_never_broken() -> None:
    path = "/a/very-long/path/" + "x" * 60
    assert wrap_lines([f"  warning      see {path}"], 40) == [
        "  warning      see",
        f"               {path}",
    ]


def test_a_finished_run_is_not_said_to_be_started_again() -> None:
    """Its private broker has ended with it."""
    finished = {
        "folder": "/runs/a",
        "step": 40,
        "steps": 40,
        "broker": None,
        "broker_error": "no broker answered",
    }
    assert missing_learner_lines(finished) == ["no learner is running: all 40 steps are done"]
    assert missing_learner_lines({**finished, "step": 39})[0].endswith(
        "continues the run where it stopped"
    )
