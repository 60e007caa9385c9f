"""Decides which part of a response counts: all of it, or what follows the thinking."""

from __future__ import annotations

from typing import Literal

from rlearner_text.thinking import CLOSE, after_thinking

# drop: only what follows the thinking counts, and nothing if the thinking does not end; required:
# nothing counts without </think>, where the chat template opens the thinking; keep: all of the
# response counts.
Thinking = Literal["drop", "required", "keep"]


def visible_text(text: str, thinking: Thinking) -> str:
    """Return the part of a response that counts, empty for a thinking that does not end."""
    if thinking == "keep":
        return text
    if thinking == "required" and CLOSE not in text:
        return ""
    return after_thinking(text)
