"""The base class of scripts that play a seat: an observation in, a text out.

Your own class derives from ``Player`` and implements ``act``; ``policies.<name>.script`` names it
by dotted path or file path. It runs where its ``isolation`` says, like an environment; see
``envhub.envs.base``.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from broker.settings.config import Section
from envhub.envs.base import Isolation


class PlayerView(msgspec.Struct, frozen=True):
    """What a player sees when it is its turn.

    Attributes:
        text: the observation, for this seat alone.
        actions: the texts that are legal now; empty if the environment does not know them.
    """

    text: str
    actions: tuple[str, ...] = ()


class Player:
    """One player; it plays one episode after another.

    Attributes:
        Args: pydantic model of ``policies.<name>.args``.
    """

    Args: ClassVar[type[Section]] = Section
    isolation: ClassVar[Isolation] = "process"

    def __init__(self, args: Any) -> None:
        """Keep ``args``, an instance of ``Args``."""
        self.args = args

    def begin(self, seat: str, seed: int) -> None:
        """Start an episode.

        Args:
            seat: that it plays, empty in environments without seats.
            seed: the source of all randomness; a pure function of task, episode and seat.
        """

    def act(self, view: PlayerView) -> str:
        """Return what it says: one text, in its turn."""
        raise NotImplementedError
