"""Reads a sampled turn as text, with the reasoning between ``<think>`` and ``</think>`` whatever
the model's syntax is.

Most models write the tags themselves. Others, such as gpt-oss, send reasoning and answer as
messages in channels: the answer follows a header of special tokens, which a chat template shows in
front of an assistant's answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlearner_text.thinking import CLOSE, OPEN

if TYPE_CHECKING:
    from rlearner_text.tokenizer import Tokenizer


class TurnReader:
    """Reads the turns of one model.

    Args:
        header: tokens between the generation prompt and an answer in the chat template; empty if
            there are none.
    """

    def __init__(self, tokenizer: Tokenizer, header: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        tags = {tag: tokenizer.token_id(tag) for tag in (OPEN, CLOSE)}
        # Special tokens vanish in decoded text, but the tags must not.
        self._tags = {
            token: tag
            for tag, token in tags.items()
            if token is not None and self._is_special(token)
        }
        is_channel = bool(header) and self._is_special(header[-1]) and header[-1] not in self._tags
        self._header = list(header) if is_channel else []

    @property
    def has_channels(self) -> bool:
        """Whether an answer follows a header of special tokens."""
        return bool(self._header)

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of a turn without special tokens; reasoning stands between its tags."""
        ids = [int(token) for token in token_ids]
        if not self._header:
            return self._tagged(ids)
        end = _last_end(ids, self._header)
        thoughts = "\n".join(self._messages(ids if end is None else ids[: end - len(self._header)]))
        if end is None:
            return f"{OPEN}\n{thoughts}" if thoughts else self._tokenizer.decode(ids)
        answer = self._tokenizer.decode(ids[end:])
        return f"{OPEN}\n{thoughts}\n{CLOSE}\n\n{answer}" if thoughts else answer

    def _messages(self, ids: Sequence[int]) -> list[str]:
        """Return the texts that follow the last token of a header, to the next special token."""
        messages: list[list[int]] = []
        is_inside = False
        for token in ids:
            if token == self._header[-1]:
                messages.append([])
                is_inside = True
            elif self._is_special(token):
                is_inside = False
            elif is_inside:
                messages[-1].append(token)
        return [self._tokenizer.decode(message) for message in messages if message]

    def _tagged(self, ids: list[int]) -> str:
        if self._tags.keys().isdisjoint(ids):
            return self._tokenizer.decode(ids)
        pieces: list[str] = []
        start = 0
        for index, token in enumerate(ids):
            if token in self._tags:
                pieces += [self._tokenizer.decode(ids[start:index]), self._tags[token]]
                start = index + 1
        return "".join([*pieces, self._tokenizer.decode(ids[start:])])

    def _is_special(self, token: int) -> bool:
        return self._tokenizer.is_special(token)


def _last_end(ids: Sequence[int], part: Sequence[int]) -> int | None:
    """Return the index behind the last occurrence of a part, None if there is none."""
    size = len(part)
    return next(
        (end for end in range(len(ids), size - 1, -1) if ids[end - size : end] == part), None
    )
