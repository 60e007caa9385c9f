"""Reads an action from a model's text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

_TAG: Final = re.compile(r"<(/?)answer>", re.IGNORECASE)
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
        text = _last_answer(text)
    return text.strip()


def _last_answer(text: str) -> str:
    """Return what is in the last ``<answer>…</answer>``; empty if there is none.

    Each tag is looked at once: a policy may write as many as it likes.
    """
    begin = None
    answer = ""
    for tag in _TAG.finditer(text):
        if not tag[1]:
            begin = tag.end() if begin is None else begin
        elif begin is not None:
            answer = text[begin : tag.start()]
            begin = None
    return answer


def one_of(text: str, actions: Mapping[str, str], answer_tag: bool) -> str | None:
    """Return the action that the text names, if any; ``actions`` has their names in capitals."""
    return actions.get(tagged(text, answer_tag).upper())
