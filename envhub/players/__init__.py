"""Scripts that play seats, by name; a new one is one file plus one line here."""

from __future__ import annotations

from typing import Final

PLAYERS: Final[dict[str, str]] = {
    "random": "envhub.players.random_player:RandomPlayer",
    "shopper": "envhub.players.shopper:Shopper",
    "solver": "envhub.players.solver:BoardSolver",
}
