"""Decodes a growing output to text that is final and never retracted (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rlearner_text.thinking import begun_length
from rlearner_text.tokenizer import Tokenizer

_PART: Final = "\ufffd"  # decoding of an incomplete character


class IncrementalDecoder:
    """Decodes token ids incrementally, at constant cost per token.

    Only the newest tokens are decoded, with the last printed ones before them: some tokenizers
    strip a space from the first token.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        # first token to decode again, and first that has printed nothing yet
        self._from = self._read = 0
        self.text = ""

    def add(self, ids: Sequence[int]) -> None:
        """Add tokens; ``text`` grows by complete characters."""
        self._ids += ids
        text_before = self._decoded(self._read)
        now = self._decoded(len(self._ids))
        if len(now) > len(text_before) and now.startswith(text_before) and not now.endswith(_PART):
            self.text += now[len(text_before) :]
            self._from = self._read
            self._read = len(self._ids)

    def _decoded(self, end: int) -> str:
        return self._tokenizer.decode(self._ids[self._from : end], skip_special_tokens=self._skip)


class PartialText:
    """Text that may be sent; holds back what may become a stop string, an end token or a tool call.

    Args:
        ends: tokens that end the output; not sent if they do.
        stops: strings that end the output; not sent.
        opener: marker of a tool call; empty: any text may be one; None: no tool calls.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        ends: frozenset[int],
        stops: Sequence[str] = (),
        opener: str | None = None,
    ) -> None:
        self._shown = IncrementalDecoder(tokenizer, skip_special_tokens=True)
        self._raw = IncrementalDecoder(tokenizer, skip_special_tokens=False) if opener else None
        self._ends = ends
        self._stops = stops
        self._opener = opener
        # An end token, until another token follows.
        self._held: list[int] = []
        self._given = ""

    def add(self, ids: Sequence[int]) -> str:
        """Add tokens and return the text that is now final."""
        ids = [*self._held, *ids]
        self._held = [ids.pop()] if ids and ids[-1] in self._ends else []
        self._shown.add(ids)
        if self._raw is not None:
            self._raw.add(ids)
        return self._give(self._certain())

    def rest(self, whole: str) -> str:
        """Return the part of the whole text that was not returned before."""
        return self._give(whole) if whole.startswith(self._given) else ""

    def _certain(self) -> str:
        text = self._shown.text
        if self._opener == "":
            return ""
        if self._opener and self._raw is not None:
            raw = self._raw.text
            if raw != text or self._opener in raw or begun_length(raw, self._opener):
                return self._given
            # White space before a call is not sent.
            text = text.rstrip()
        for stop in self._stops:
            at = text.find(stop, max(0, len(self._given) - len(stop)))
            text = text[:at] if at >= 0 else text[: len(text) - begun_length(text, stop)]
        return text

    def _give(self, text: str) -> str:
        if len(text) <= len(self._given):
            return ""
        new = text[len(self._given) :]
        self._given = text
        return new
