"""What a model thinks before it speaks, between ``<think>`` and ``</think>``."""

from __future__ import annotations

from typing import Final

OPEN: Final = "<think>"
CLOSE: Final = "</think>"


def without_thinking(text: str) -> str:
    """The words that follow the thinking; the text as it is where there is none.

    A chat template may have opened the block already, so what stands before a ``</think>`` is thinking with or without a ``<think>``.
    A block that is never closed is thinking to its end.
    """
    _, closed, said = text.rpartition(CLOSE)
    said, opened, _ = (said if closed else text).partition(OPEN)
    return said.lstrip() if closed or opened else text
