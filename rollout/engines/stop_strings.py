"""Stop strings: generation ends as soon as the decoded output contains one."""

from __future__ import annotations

from collections.abc import Sequence

from rlearner_text.tokenizer import Tokenizer


class StopStrings:
    """Detects whether the newest token completes one of a request's stop strings.

    Only the tail of the output is decoded: at one byte per token, a string that ends with the
    newest token starts at most as many tokens back as it has bytes, plus some room for tokens that
    print nothing.

    Attributes:
        window: size of this tail in tokens.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = [stop for stop in stops if stop]
        self.window = 8 + max((len(stop.encode()) for stop in self._stops), default=0)

    def hit(self, output: Sequence[int]) -> bool:
        """Return whether the tail of ``output``, all tokens sampled so far, contains a stop string."""
        text = self._tokenizer.decode(output[-self.window :], skip_special_tokens=False)
        return any(stop in text for stop in self._stops)
