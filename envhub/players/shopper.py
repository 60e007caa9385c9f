"""A user simulator for ``booking``: says what it is asked for, and nothing else."""

from __future__ import annotations

from broker.settings.config import NoArguments
from envhub.envs.dialogues.booking import answer_question, read_facts
from envhub.players.base import Player, PlayerView


class Shopper(Player):
    """An honest and terse user."""

    Args = NoArguments
    isolation = "none"

    def begin(self, seat: str, seed: int) -> None:
        self._facts: dict[str, str] = {}

    def act(self, view: PlayerView) -> str:
        if not self._facts:
            self._facts = read_facts(view.text)
        return answer_question(view.text, self._facts)
