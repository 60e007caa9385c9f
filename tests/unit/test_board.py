"""What the live view folds out of messages."""

import math

from rich.console import Console

from broker import wire
from learner.up.board import Board, duration, sparkline
from learner.up.view import screen


def line(step: int, reward: float, **more: float) -> wire.Metrics:
    values = {"step": float(step), "reward/mean": reward, "env/success_rate": reward, **more}
    return wire.Metrics(role="learner", id="l", time=0.0, values=values)


def test_sparkline_scales_between_minimum_and_maximum() -> None:
    assert sparkline([0.0, 1.0]) == "▁█"
    assert sparkline([5.0, 5.0]) == "▁▁"
    assert sparkline([math.nan]) == ""
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert len(sparkline(list(range(100)), width=30)) == 30


def test_durations() -> None:
    assert [duration(s) for s in (0, 65, 3600, 3725.4)] == ["0:00", "1:05", "1:00:00", "1:02:05"]


def test_only_a_new_step_counts_and_the_eta_follows_the_pace() -> None:
    board = Board("r", total_steps=10)
    assert board.take(line(1, 0.2), now=100.0)
    assert not board.take(line(1, 0.9), now=101.0)
    assert board.eta_s() is None
    assert board.take(line(3, 0.4), now=104.0)
    assert board.rewards == [0.2, 0.4]
    assert board.eta_s() == 14.0  # 2 s a step, 7 steps to go


def test_other_processes_never_change_the_step() -> None:
    board = Board("r", total_steps=10)
    assert not board.take(wire.Metrics(role="rollout", id="x", time=0.0, values={"step": 5.0, "reward/mean": 1.0}), now=1.0)
    assert board.step == 0


def test_evaluations_and_baselines() -> None:
    board = Board("r", total_steps=10)
    board.take(line(2, 0.1, **{"eval/success_rate": 0.25, "eval/random/success_rate": 0.02}), now=1.0)
    assert board.evals == [(2, 0.25)]
    assert board.baselines == {"random": 0.02}
    assert "eval success 0.250" in board.plain()


def test_the_screen_names_every_process() -> None:
    board = Board("demo", total_steps=4)
    board.take(line(2, 0.5, **{"queue/tickets/depth": 3.0}), now=1.0)
    board.see(
        [wire.Presence(role="rollout", id="r1", host="h", pid=42, state="serving", engine="hf", policy_version=2, slots=8, running=3)]
    )
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(screen(board, ["envhub died"]))
    shown = console.export_text()
    console.file.close()
    for expected in ("demo", "step 2/4", "rollout r1", "serving", "42", "3/8", "tickets 3", "envhub died", "0.500"):
        assert expected in shown, expected
