"""The games of two seats, move by move, and what an illegal move costs."""

from __future__ import annotations

import numpy as np
import pytest

from envhub.envs.base import StepResult
from envhub.envs.games.board_game import BoardGame, BoardGameArgs
from envhub.envs.games.connect_four import LINES, ConnectFour
from envhub.envs.games.tic_tac_toe import TicTacToe
from envhub.players.base import PlayerView
from envhub.players.solver import BoardSolver, SolverArgs


def play(game: BoardGame, moves: str) -> StepResult:
    game.reset(0, "train", 1)
    return [game.step(move) for move in moves][-1]


def test_a_line_wins_tic_tac_toe() -> None:
    game = TicTacToe(BoardGameArgs())
    view = game.reset(0, "train", 1)
    assert (view.seat, view.text, view.actions) == ("X", "X\n123\n456\n789", tuple("123456789"))
    step = game.step("5")
    assert (step.observation.seat, step.observation.text) == ("O", "O\n123\n4X6\n789")
    assert step.observation.actions == tuple("12346789")
    assert (step.done, step.reward, step.seat_rewards) == (False, 0.0, {})
    end = play(game, "51397")
    assert (end.done, end.seat_rewards, end.seat_successes) == (True, {"X": 1.0, "O": -1.0}, ("X",))


@pytest.mark.parametrize(("success", "seats"), [("win", ()), ("draw", ("X", "O"))])
def test_a_full_board_is_a_draw(success: str, seats: tuple[str, ...]) -> None:
    args = BoardGameArgs.model_validate({"success": success})
    end = play(TicTacToe(args), "512374689")
    assert (end.done, end.seat_rewards, end.seat_successes, end.reward) == (True, {}, seats, 0.0)


def test_an_illegal_move_loses() -> None:
    end = play(TicTacToe(BoardGameArgs(success="draw")), "55")
    assert (end.done, end.valid, end.reward, end.seat_rewards) == (True, False, -1.0, {})
    assert end.seat_successes == ("X",)


def test_an_illegal_move_may_be_replaced() -> None:
    game = TicTacToe(BoardGameArgs(illegal="random", illegal_reward=-0.5))
    game.reset(0, "train", 1)
    step = game.step("middle")
    assert (step.done, step.valid, step.reward) == (False, False, -0.5)
    assert step.observation.text.count("X") == 1
    assert step.observation.seat == "O"


def test_random_plies_depend_on_the_task_alone() -> None:
    game = TicTacToe(BoardGameArgs(random_plies=4))
    openings = [game.reset(task, "train", 10 + task).text for task in range(50)]
    assert openings == [game.reset(task, "train", 10 + task).text for task in range(50)]
    counts = {
        text.partition("\n")[2].count("X") + text.partition("\n")[2].count("O") for text in openings
    }
    assert counts == {0, 1, 2, 3, 4}
    assert {text[0] for text in openings} == {"X", "O"}


def test_the_solver_never_loses_tic_tac_toe() -> None:
    rng = np.random.default_rng(0)
    for number in range(60):
        game = TicTacToe(BoardGameArgs())
        view = game.reset(0, "train", number)
        own_seat = "XO"[number % 2]
        while True:
            noise = 0.0 if view.seat == own_seat else 1.0
            step = game.step(game.demonstrate(rng, noise))
            if step.done:
                break
            view = step.observation
        assert step.seat_rewards.get(own_seat, 0.0) >= 0


def test_connect_four_has_gravity_and_69_lines() -> None:
    assert len(LINES) == 69
    game = ConnectFour(BoardGameArgs())
    end = play(game, "1212121")
    assert (end.done, end.seat_rewards) == (True, {"X": 1.0, "O": -1.0})
    assert game.text_frame().split("\n")[2:] == ["X......", "XO.....", "XO.....", "XO....."]
    full = play(ConnectFour(BoardGameArgs()), "1111111")
    assert (full.done, full.valid) == (True, False)
    diagonal = play(ConnectFour(BoardGameArgs()), "12233434474")
    assert diagonal.seat_rewards == {"X": 1.0, "O": -1.0}


def test_connect_four_solver_blocks_and_wins() -> None:
    game = ConnectFour(BoardGameArgs())
    rng = np.random.default_rng(0)
    play(game, "12121")
    assert game.demonstrate(rng, 0.0) == "1"
    play(game, "121212")
    assert game.demonstrate(rng, 0.0) == "1"


def test_the_solver_reads_the_board_that_it_sees() -> None:
    player = BoardSolver(SolverArgs())
    player.begin("O", 3)
    view = PlayerView("O\nXX3\nOO6\nX89", ("3", "6", "8", "9"))
    assert player.act(view) == "6"
    with pytest.raises(ValueError, match="plays tic_tac_toe and connect_four only"):
        player.act(PlayerView("hello"))
