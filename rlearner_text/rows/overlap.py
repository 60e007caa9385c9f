"""Finds questions that repeat others, or stand in evaluation sets. Pure.

Two questions are the same if their words are: case, punctuation and spaces do not count. A question
overlaps with another one if they have a run of ``n`` words in common, as in Brown et al., GPT-3
(arXiv 2005.14165, appendix C), where n is 13. Questions of fewer words only count if they are the
same.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Final

_WORD: Final = re.compile(r"\w+")


def split_words(text: str) -> list[str]:
    """Return the words of a text in the form in which they are compared."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


class QuestionIndex:
    """Questions by the digests of all their words, and of their runs of words.

    Args:
        num_words: of a run, 0: only whole questions are compared.
    """

    def __init__(self, num_words: int = 0) -> None:
        self._num_words = num_words
        self._wholes = set[bytes]()
        self._runs = set[bytes]()

    def add(self, text: str) -> bool:
        """Add a question; return whether it was new."""
        words = split_words(text)
        whole = _digest_words(words)
        is_new = whole not in self._wholes
        self._wholes.add(whole)
        self._runs.update(self._word_runs(words))
        return is_new

    def update(self, texts: Iterable[str]) -> None:
        """Add questions."""
        for text in texts:
            self.add(text)

    def overlaps(self, text: str) -> bool:
        """Return whether the question is one of the index, or has a run of words of one."""
        words = split_words(text)
        if _digest_words(words) in self._wholes:
            return True
        return any(run in self._runs for run in self._word_runs(words))

    def _word_runs(self, words: list[str]) -> Iterator[bytes]:
        if not self._num_words:
            return
        for first in range(len(words) - self._num_words + 1):
            yield _digest_words(words[first : first + self._num_words])


def _digest_words(words: list[str]) -> bytes:
    return blake2b(" ".join(words).encode(), digest_size=8).digest()
