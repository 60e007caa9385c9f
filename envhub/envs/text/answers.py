"""Reading an action out of what a model wrote."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

_ANSWER: Final = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
MOVES: Final = {"L": "L", "D": "D", "R": "R", "U": "U", "LEFT": "L", "DOWN": "D", "RIGHT": "R", "UP": "U"}


def tagged(text: str, answer_tag: bool) -> str:
    """The text without surrounding blanks; with ``answer_tag``, what the last ``<answer>…</answer>`` holds, empty
    without one.
    """
    if answer_tag:
        found = _ANSWER.findall(text)
        text = found[-1] if found else ""
    return text.strip()


def one_of(text: str, actions: Mapping[str, str], answer_tag: bool) -> str | None:
    """The action that the text names, None when it names none.

    Args:
        actions: what it stands for, by its name in capitals.
    """
    return actions.get(tagged(text, answer_tag).upper())
