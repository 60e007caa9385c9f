"""What the live view folds out of messages."""

import io
import math
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from broker.contract import wire
from rlearner.up.failed_groups import FailedGroups, by_reason, shorten_text
from rlearner.up.live_state import LiveRunState, format_duration, sparkline
from rlearner.up.run import DRAW_EVERY_S
from rlearner.up.view import draw_screen, health_table

LOGS = Path("runs/r/logs")


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
    assert [format_duration(s) for s in (0, 65, 3600, 3725.4)] == [
        "0:00",
        "1:05",
        "1:00:00",
        "1:02:05",
    ]


def test_only_a_new_step_counts_and_the_eta_follows_the_pace() -> None:
    board = LiveRunState("r", total_steps=10)
    assert board.take(line(1, 0.2), now=100.0)
    assert not board.take(line(1, 0.9), now=101.0)
    assert board.eta_s() is None
    assert board.take(line(3, 0.4), now=104.0)
    assert board.rewards == [0.2, 0.4]
    assert board.eta_s() == 14.0  # 2 s a step, 7 steps to go


def test_other_processes_never_change_the_step() -> None:
    board = LiveRunState("r", total_steps=10)
    assert not board.take(
        wire.Metrics(role="rollout", id="x", time=0.0, values={"step": 5.0, "reward/mean": 1.0}),
        now=1.0,
    )
    assert board.step == 0


def test_evaluations_and_baselines() -> None:
    board = LiveRunState("r", total_steps=10)
    board.take(
        line(
            4,
            0.1,
            **{"eval/success_rate": 0.25, "eval/step": 0.0, "eval/random/success_rate": 0.02},
        ),
        now=1.0,
    )
    assert board.evals == [(0, 0.25)]
    assert board.baselines == {"random": 0.02}
    assert "eval success 0.250 after step 0" in board.plain()
    screen = io.StringIO()
    Console(file=screen, width=200).print(draw_screen(board, [], LOGS))
    assert "0.250 after step 0" in screen.getvalue()


def test_screen_has_no_figures_before_the_first_step() -> None:
    board = LiveRunState("r", total_steps=10)
    screen = io.StringIO()
    Console(file=screen, width=100).print(draw_screen(board, [], LOGS))
    assert "0.0" not in screen.getvalue()
    assert "0%" not in screen.getvalue()


def test_screen_costs_a_fiftieth_of_a_core() -> None:
    """As ``rlearner up`` draws it, in processor time."""
    board = LiveRunState("r", total_steps=40)
    for step in range(1, 40):
        board.take(line(step, 0.5, **{"queue/tickets/depth": 3.0}), now=float(step))
    roles = ("learner", "rollout", "envhub", "rewardhub")
    board.see(
        wire.Presence(role=role, id=role, host="h", pid=1, state="serving", epoch=1)
        for role in roles
    )
    console = Console(file=io.StringIO(), width=140, height=40, force_terminal=True)
    costs = []
    with Live(console=console, auto_refresh=False) as live:
        for _ in range(10):
            began = time.process_time()
            live.update(draw_screen(board, [], LOGS), refresh=True)
            costs.append(time.process_time() - began)
    assert min(costs) / DRAW_EVERY_S < 0.02


def test_the_screen_names_every_process() -> None:
    board = LiveRunState("demo", total_steps=4)
    board.take(line(2, 0.5, **{"queue/tickets/depth": 3.0}), now=1.0)
    board.see(
        [
            wire.Presence(
                role="rollout",
                id="r1",
                host="h",
                pid=42,
                state="serving",
                engine="hf",
                policy_version=2,
                slots=8,
                running=3,
            )
        ]
    )
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(draw_screen(board, ["envhub died"], LOGS))
    shown = console.export_text()
    console.file.close()
    for expected in (
        "demo",
        "step 2/4",
        "rollout r1",
        "serving",
        "42",
        "3/8",
        "tickets 3",
        "envhub died",
        "0.500",
    ):
        assert expected in shown, expected


def test_names_and_states_are_whole_at_80_columns() -> None:
    board = LiveRunState("quickstart-20261122-201146", total_steps=4)
    ids = {
        "learner": "learner",
        "rollout": "rollout-12d687-9c1d",
        "envhub": "envhub-12d687-9c1d",
        "rewardhub": "rewardhub-12d687-9c1d",
    }
    more: dict[str, Any] = {
        "pid": 1234567,
        "running": 12,
        "slots": 64,
        "waiting": 3,
        "policy_version": 12,
    }
    serves = ["lake", "sokoban", "webshop"]
    board.see(
        [
            wire.Presence(role=role, id=name, host="h", state="draining", serves=serves, **more)
            for role, name in ids.items()
        ]
    )
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(health_table(board))
    rows = console.export_text().splitlines()
    assert [line.split()[:6] for line in rows[1:]] == [
        [ids[role], "draining", "1234567", "12", "12/64", "3"] for role in sorted(ids)
    ]
    assert max(len(line.rstrip()) for line in rows) <= 80


def hub(problem: str) -> wire.Presence:
    return wire.Presence(
        role="envhub",
        id="e1",
        host="h",
        pid=42,
        state="failed" if problem else "serving",
        problem=problem,
    )


def test_a_hub_that_takes_no_work_is_shown_and_told_once() -> None:
    board = LiveRunState("r", total_steps=4)
    told = [
        board.see([hub(problem)])
        for problem in ("", "domain d: no disk", "domain d: still no disk", "", "")
    ]
    assert told == [[], ["envhub e1: domain d: no disk"], [], ["envhub e1 takes work again"], []]
    board.see([hub("domain d: no disk")])
    with open("/dev/null", "w") as nowhere:
        console = Console(width=120, record=True, file=nowhere)
        console.print(draw_screen(board, [], LOGS))
    assert "envhub e1: domain d: no disk" in console.export_text()


def failing(trained: int, **closed: int) -> wire.Metrics:
    values = {
        "ticket/trained": float(trained),
        **{f"ticket/closed_{reason}": float(count) for reason, count in closed.items()},
    }
    text = {
        "phase": "training",
        "failure": "reward_error: episode 0: KeyError: 'x' (bad.py:7 in f)",
        "failed_by": "rewardhub-1",
    }
    return wire.Metrics(role="learner", id="l", time=0.0, values=values, text=text)


def test_failed_groups_are_told_at_the_first_at_twice_as_many_and_every_minute_in_which_none_is_trained() -> (
    None
):
    board = LiveRunState("r", total_steps=4)
    told = []
    for now, metrics in enumerate(
        [failing(0, late=9)]
        + [failing(0, reward_error=count) for count in (1, 1, 2, 3, 4, 5, 12, 13)]
    ):
        board.take(metrics, float(now))
        told.append(board.failures.news(float(now), LOGS).partition(" ")[0])
    assert told == ["", "1", "", "2", "", "4", "", "12", ""]
    assert board.failures.news(66.9, LOGS) == ""
    last = "last: reward_error: episode 0: KeyError: 'x' (bad.py:7 in f), see runs/r/logs/rewardhub.log"
    assert board.failures.news(67.0, LOGS) == f"13 groups failed so far, none trained yet; {last}"
    board.take(failing(4, reward_error=13, env_error=1), 68.0)
    assert board.failures.news(200.0, LOGS).startswith("14 groups failed so far, 4 trained; last: ")
    board.take(failing(8, reward_error=13, env_error=1), 201.0)
    assert (board.failures.stuck, board.failures.news(400.0, LOGS)) == (False, "")
    board.take(line(1, 0.5), 402.0)
    assert "failed groups 14" in board.plain()


def test_the_screen_shows_failed_groups_as_long_as_the_run_lasts() -> None:
    board = LiveRunState("r", total_steps=4)
    board.take(failing(0, env_error=1), 0.0)
    with open("/dev/null", "w") as nowhere:
        console = Console(width=200, record=True, file=nowhere)
        console.print(draw_screen(board, [], LOGS))
    shown = console.export_text()
    assert (
        "1 group failed so far, none trained yet; last: reward_error: episode 0: KeyError: 'x' (bad.py:7 in f), see "
        "runs/r/logs" in shown
    )


def test_failures_in_few_words() -> None:
    assert by_reason({"env_error": 2, "reward_error": 33}) == "35 (reward_error 33, env_error 2)"
    assert FailedGroups().line(LOGS).endswith("see runs/r/logs/learner.log")
    assert (len(shorten_text("a" * 1000)), shorten_text("a" * 400)) == (403, "a" * 400)


def test_a_warning_about_learning_is_told_once_and_stays_on_the_screen_until_it_is_over() -> None:
    board = LiveRunState("r", total_steps=9)
    told = []
    for step, ratio in enumerate([0.1, 0.6, 0.7, 0.1, 0.1, 0.1, 0.1], start=1):
        board.take(line(step, 0.5, **{"response_length/clip_ratio": ratio}), float(step))
        told.append([text[:31] for text in board.news])
        board.news.clear()
        with open("/dev/null", "w") as nowhere:
            console = Console(width=120, record=True, file=nowhere)
            console.print(draw_screen(board, [], LOGS))
        assert ("warning: 60% of the responses" in console.export_text()) == (2 <= step <= 5)
    assert told == [
        [],
        ["warning: 60% of the responses w"],
        [],
        [],
        [],
        ["no longer: 60% of the responses"],
        [],
    ]


def saying(said: str) -> wire.Presence:
    return wire.Presence(role="rollout", id="r1", host="h", pid=42, state="starting", said=said)


def test_what_a_process_logged_is_shown_and_told_at_growing_intervals() -> None:
    board, told = LiveRunState("r", total_steps=4), []
    for now in range(60):
        board.see(
            [saying(f"2026-11-22 18:03:{now:02d} ERROR no model {now}" if now else "")], float(now)
        )
        told += [(now, text) for text in board.news]
        board.news.clear()
    assert [now for now, _ in told] == [1, 6, 16, 36]
    assert told[0][1] == "rollout r1: 2026-11-22 18:03:01 ERROR no model 1"
    with open("/dev/null", "w") as nowhere:
        console = Console(width=120, record=True, file=nowhere)
        console.print(draw_screen(board, [], LOGS))
    assert "rollout r1: 2026-11-22 18:03:59 ERROR no model 59" in console.export_text()
    board.see([saying("")], 60.0)
    assert board.said() == []
