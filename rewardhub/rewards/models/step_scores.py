"""Divides responses into steps, and combines the scores of steps. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

# Of a response without any step: the lowest score there is.
NOTHING: Final = 0.0
AGGREGATES: Final[dict[str, Callable[[Sequence[float]], float]]] = {
    "min": min,
    "product": math.prod,
    "last": lambda scores: scores[-1],
    "mean": lambda scores: math.fsum(scores) / len(scores),
}


def split_steps(text: str, separator: str) -> list[str]:
    """Return the steps of a text without white space around them; empty ones are left out."""
    return [step for part in text.split(separator) if (step := part.strip())]


def combine_steps(
    turns: Sequence[Sequence[float]], aggregate: str, *, per_turn: bool
) -> list[float]:
    """Return one score for each turn, or a single one for the episode.

    Args:
        turns: scores of the steps of each turn; a turn without steps has ``NOTHING``.
        aggregate: a name of ``AGGREGATES``.
        per_turn: False combines the steps of all turns.
    """
    groups = turns if per_turn else [[score for steps in turns for score in steps or [NOTHING]]]
    combine = AGGREGATES[aggregate]
    return [combine(steps or [NOTHING]) for steps in groups]
