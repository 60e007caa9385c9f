"""Finds what a policy would have sampled for an assistant's message, from renderings (pure).

A template renders a finished turn as it looks in a history, which need not continue its own
generation prompt: R1 opens ``<think>`` in the prompt and shows turns without it, and many templates
drop the reasoning of finished turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlearner_text.thinking import CLOSE, OPEN, is_open

_GAP = "\n\n"  # between reasoning and answer, if the template does not show it


def common_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the length of the common beginning of two texts or sequences."""
    shortest = min(len(first), len(second))
    return next((index for index in range(shortest) if first[index] != second[index]), shortest)


def rendered_span(prompt: str, turn: str, end: str, content: str) -> str | None:
    """Return what a template renders from its generation prompt to the assistant's end of turn.

    None if that does not continue the prompt, or lacks something that the message says, such as its
    reasoning.

    Args:
        prompt: the text behind a user's message, generation prompt included.
        turn: the text behind the same message, with the assistant's message and its end.
        end: the text with which the template ends a turn.
        content: of the assistant's message.
    """
    if not turn.startswith(prompt) or not turn.endswith(end) or len(turn) < len(prompt) + len(end):
        return None
    span = turn[len(prompt) : len(turn) - len(end)]
    return span if not is_open(content) and _is_complete(span, content) else None


def continued_span(prompt: str, turn: str, content: str) -> str:
    """Return a message fitted to the generation prompt, which may open a reasoning block.

    Args:
        prompt, turn, content: as ``rendered_span``.
    """
    if not is_open(prompt):
        return content
    space = prompt.rpartition(OPEN)[2]
    if OPEN in content or CLOSE in content:
        return content.lstrip().removeprefix(OPEN).removeprefix(space)
    # the template's own text between an empty block and an answer, if it shows one
    header = turn[common_length(prompt, turn) : turn.rfind(content)] if content else ""
    gap = header.rpartition(CLOSE)[2] if CLOSE in header else _GAP
    return f"{space}{CLOSE}{gap}{content}"


def _is_complete(span: str, content: str) -> bool:
    reasoning, _, answer = content.rpartition(CLOSE)
    return reasoning.strip().removeprefix(OPEN).strip() in span and answer.strip() in span
