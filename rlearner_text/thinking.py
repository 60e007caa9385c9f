"""Removes a model's reasoning between ``<think>`` and ``</think>``."""

from __future__ import annotations

from typing import Final

OPEN: Final = "<think>"
CLOSE: Final = "</think>"


def without_thinking(text: str) -> str:
    """Return the text after the reasoning, or the whole text if there is none.

    Text before a ``</think>`` is reasoning even without a ``<think>``, because a chat template may
    have opened the block. An unclosed block is reasoning to its end.
    """
    _, closed, answer = text.rpartition(CLOSE)
    answer, opened, _ = (answer if closed else text).partition(OPEN)
    return answer.lstrip() if closed or opened else text


def after_thinking(text: str) -> str:
    """Return the text after the reasoning; nothing if its last block is not closed, for that is no
    answer.
    """
    _, closed, answer = text.rpartition(CLOSE)
    answer = answer if closed else text
    return "" if OPEN in answer else answer


def is_open(text: str) -> bool:
    """Return whether a text ends inside a block of reasoning."""
    return text.rfind(OPEN) > text.rfind(CLOSE)
