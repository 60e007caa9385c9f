"""Stop strings: they end generation as soon as the text of the output holds one."""

from __future__ import annotations

from collections.abc import Sequence

from rlearner_text.tokenizer import Tokenizer


class StopStrings:
    """Whether the newest token completed one of a request's stop strings.

    Only the tail of the output is decoded: a string that ends with the newest token cannot begin further back than it has
    bytes, at one byte a token, with some room for tokens that print nothing.

    Attributes:
        window: how many tokens that is.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = [stop for stop in stops if stop]
        self.window = 8 + max((len(stop.encode()) for stop in self._stops), default=0)

    def hit(self, output: Sequence[int]) -> bool:
        """``output`` is all that was sampled so far, the newest token last."""
        text = self._tokenizer.decode(output[-self.window :], skip_special_tokens=False)
        return any(stop in text for stop in self._stops)
