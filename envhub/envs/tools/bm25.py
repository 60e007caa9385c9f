"""Searches texts by BM25 (Robertson and Zaragoza 2009) with bm25s (Lù 2024, arXiv:2407.03618)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import numpy as np

_WORD: Final = re.compile(r"\w+")
_STOP_WORDS: Final = """
a an and are as at be but by for from has have i if in into is it its me my no not of on or than
that the their then there these they this to was what when where which who will with would you your
"""
STOP_WORDS: Final = frozenset(_STOP_WORDS.split())


def words(text: str) -> list[str]:
    """Return the words that count, in lower case and in order."""
    return [word for word in _WORD.findall(text.lower()) if word not in STOP_WORDS]


class SearchIndex:
    """Texts that can be searched; immutable once made."""

    def __init__(self, texts: Sequence[str]) -> None:
        """Index the texts, which are not kept."""
        # takes half a second, which hubs without a search need not wait for
        import bm25s

        tokens = [words(text) for text in texts]
        self._known = {word for text_tokens in tokens for word in text_tokens}
        self._scorer = bm25s.BM25()
        if self._known:
            self._scorer.index(tokens, show_progress=False)

    def search(self, query: str, limit: int) -> list[int]:
        """Return the positions of at most ``limit`` texts with a word of the query, best first."""
        terms = [word for word in words(query) if word in self._known]
        if not terms:
            return []
        scores = self._scorer.get_scores(terms)
        positions = np.flatnonzero(scores > 0)
        # sort only what may be shown of a large corpus
        if len(positions) > limit:
            least = np.partition(scores[positions], -limit)[-limit]
            positions = positions[scores[positions] >= least]
        order = np.argsort(-scores[positions], kind="stable")
        return [int(position) for position in positions[order][:limit]]
