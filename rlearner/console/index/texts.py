"""Prepares texts and queries for the full-text search."""

from __future__ import annotations

import re
from typing import Final

MAX_CHARS: Final = 2**16  # of one text that are searchable
PREVIEW_CHARS: Final = 160
# Chinese, Japanese, Korean, Thai and others write without spaces: each character counts as a word
_UNSPACED: Final = re.compile(
    "([\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u9fff\ua960-\ua97f"
    "\uac00-\ud7ff\uf900-\ufaff\U00020000-\U0003ffff])"
)
_PART: Final = re.compile(r'"([^"]*)"?|(\S+)')


def searchable(text: str) -> str:
    """Return a text as it is indexed."""
    text = text[:MAX_CHARS]
    return text if text.isascii() else _UNSPACED.sub(r" \1 ", text)


def preview(text: str) -> str:
    """Return the beginning of a text in one line."""
    return " ".join(text[: 2 * PREVIEW_CHARS].split())[:PREVIEW_CHARS]


def words_of(text: str) -> list[str]:
    """Return what a text must hold: the words and the quoted phrases of a query."""
    phrases = [phrase or word for phrase, word in _PART.findall(text)]
    return [phrase.strip() for phrase in phrases if any(map(str.isalnum, phrase))]


def match_expression(text: str) -> str:
    """Return the query for FTS5, empty if it has no word; the last word may be the begin of one."""
    words = words_of(text)
    quoted = ['"' + searchable(word).replace('"', "").strip() + '"' for word in words]
    if quoted and not text.rstrip().endswith('"'):
        quoted[-1] += "*"
    return " AND ".join(quoted)
