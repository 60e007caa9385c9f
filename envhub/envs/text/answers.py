"""Reads an action from a model's text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

_ANSWER: Final = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
MOVES: Final = {
    "L": "L",
    "D": "D",
    "R": "R",
    "U": "U",
    "LEFT": "L",
    "DOWN": "D",
    "RIGHT": "R",
    "UP": "U",
}


def tagged(text: str, answer_tag: bool) -> str:
    """Return the text, or its last ``<answer>…</answer>`` with ``answer_tag``, without blanks."""
    if answer_tag:
        answers = _ANSWER.findall(text) or [""]
        text = answers[-1]
    return text.strip()


def one_of(text: str, actions: Mapping[str, str], answer_tag: bool) -> str | None:
    """Return the action that the text names, if any; ``actions`` has their names in capitals."""
    return actions.get(tagged(text, answer_tag).upper())
