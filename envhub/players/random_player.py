"""Plays a legal action at random."""

from __future__ import annotations

import random

from broker.settings.config import Section
from envhub.players.base import Player, PlayerView


class ChoiceArgs(Section):
    """``args`` of ``random``."""

    harmless = ("choices",)

    # what it draws from where the environment does not say which actions are legal
    choices: tuple[str, ...] = ()


class RandomPlayer(Player):
    """Draws from the legal actions."""

    Args = ChoiceArgs
    isolation = "none"

    args: ChoiceArgs

    def begin(self, seat: str, seed: int) -> None:
        self._rng = random.Random(seed)

    def act(self, view: PlayerView) -> str:
        choices = view.actions or self.args.choices
        if not choices:
            raise ValueError("the environment names no legal actions; set args.choices")
        return self._rng.choice(choices)
