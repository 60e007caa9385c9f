"""Reads a model's reasoning between ``<think>`` and ``</think>``, or removes it."""

from __future__ import annotations

from typing import Final, Literal

OPEN: Final = "<think>"
CLOSE: Final = "</think>"

TextPiece = tuple[Literal["thinking", "text"], str]


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


def with_thinking(reasoning: str, text: str) -> str:
    """Return a text with reasoning before it; chat templates look for it there."""
    if not reasoning:
        return text
    return f"{OPEN}\n{reasoning}\n{CLOSE}\n\n{text}"


def split_thinking(text: str, *, is_open: bool = False) -> tuple[str, str]:
    """Return the reasoning at the beginning of a text and the rest; see ``ThinkingSplitter``."""
    splitter = ThinkingSplitter(is_open=is_open)
    pieces = [*splitter.add(text), *splitter.end()]
    reasoning = "".join(piece for kind, piece in pieces if kind == "thinking")
    return reasoning, "".join(piece for kind, piece in pieces if kind == "text")


class ThinkingSplitter:
    """Splits a growing text into the reasoning at its beginning and the rest.

    White space around the reasoning belongs to neither. A text that does not begin with reasoning
    stays as it is. What may become a tag is held back until it is one or not.

    Args:
        is_open: whether the prompt has opened the reasoning.
    """

    def __init__(self, *, is_open: bool = False) -> None:
        self._stage: Literal["start", "thinking", "text"] = "start"
        if is_open:
            self._stage = "thinking"
        self._pending = ""
        # white space at the beginning of a stage is left out
        self._trims = is_open

    def add(self, text: str) -> list[TextPiece]:
        """Return the pieces that are certain once this text has followed."""
        self._pending += text
        if self._stage == "start":
            self._find_start()
        if self._trims and self._stage != "start":
            self._pending = self._pending.lstrip()
        pieces: list[TextPiece] = []
        if self._stage == "thinking":
            pieces += self._take_thinking()
        if self._stage == "text":
            pieces += self._take_text()
        return pieces

    def end(self) -> list[TextPiece]:
        """Return what was held back; nothing follows."""
        rest = self._pending
        self._pending = ""
        if self._stage == "thinking":
            return _filled("thinking", rest.rstrip())
        return _filled("text", rest)

    def _find_start(self) -> None:
        text = self._pending.lstrip()
        if text.startswith(OPEN):
            self._stage = "thinking"
            self._trims = True
            self._pending = text[len(OPEN) :]
        elif not OPEN.startswith(text):
            self._stage = "text"

    def _take_thinking(self) -> list[TextPiece]:
        reasoning, closed, rest = self._pending.partition(CLOSE)
        if closed:
            self._stage = "text"
            self._trims = True
            self._pending = rest.lstrip()
            return _filled("thinking", reasoning.rstrip())
        certain = reasoning[: len(reasoning) - begun_length(reasoning, CLOSE)].rstrip()
        self._pending = reasoning[len(certain) :]
        self._trims = self._trims and not certain
        return _filled("thinking", certain)

    def _take_text(self) -> list[TextPiece]:
        text = self._pending
        self._pending = ""
        self._trims = self._trims and not text
        return _filled("text", text)


def begun_length(text: str, word: str) -> int:
    """Return how many characters at the end of a text may begin a word."""
    most = min(len(word) - 1, len(text))
    return next((size for size in range(most, 0, -1) if text.endswith(word[:size])), 0)


def _filled(kind: Literal["thinking", "text"], text: str) -> list[TextPiece]:
    if not text:
        return []
    return [(kind, text)]
