"""Plays tic-tac-toe perfectly, and Connect Four two moves ahead, by the board that it sees."""

from __future__ import annotations

import random
import re
from typing import Annotated, Final

from pydantic import Field

from broker.settings.config import Section
from envhub.envs.games.board_game import EMPTY, BoardGame
from envhub.envs.games.connect_four import ConnectFour
from envhub.envs.games.tic_tac_toe import TicTacToe
from envhub.players.base import Player, PlayerView

GAMES: Final[dict[int, type[BoardGame]]] = {
    len(game.first_board): game for game in (TicTacToe, ConnectFour)
}


class SolverArgs(Section):
    """``args`` of ``solver``."""

    harmless = ("noise",)

    noise: Annotated[float, Field(ge=0, le=1)] = 0.0  # share of moves that are random instead


class BoardSolver(Player):
    """A strong opponent in the board games of two seats."""

    Args = SolverArgs
    isolation = "none"

    args: SolverArgs

    def begin(self, seat: str, seed: int) -> None:
        self._rng = random.Random(seed)

    def act(self, view: PlayerView) -> str:
        seat, _, board = view.text.partition("\n")
        cells = re.sub(r"\d", EMPTY, board.replace("\n", ""))
        if len(cells) not in GAMES:
            raise ValueError("the solver plays tic_tac_toe and connect_four only")
        if self._rng.random() < self.args.noise:
            return self._rng.choice(view.actions)
        return self._rng.choice(GAMES[len(cells)].best_moves(cells, seat))
