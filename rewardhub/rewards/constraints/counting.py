"""Counts the words, sentences, paragraphs and marks of a text. Pure, in linear time."""

from __future__ import annotations

import re
from typing import Final

# Vowel signs of Indic scripts, Thai and Arabic, and combining accents: parts of words that \w does
# not match. The dandas (\u0964, \u0965) end sentences.
_MARKS: Final = (
    "\u0300-\u036f\u0610-\u061a\u064b-\u065f\u0900-\u0963\u0966-\u0dff\u0e31-\u0e4e\u200c\u200d"
)
_WORD: Final = re.compile(rf"\w[\w{_MARKS}]*+")
# A word with hyphens, apostrophes or inner full stops is one: COVID-19, U.S.
_JOINED_WORD: Final = re.compile(r"\w++(?:[-'’.&]\w++)*+")
# Starts at the first mark only, so that a long run of marks is scanned once.
_SENTENCE_END: Final = re.compile(
    r"(?<![.!?…])[.!?…]++[\"'”’»)\]*_]*+(?=\s|\Z)|[。！？।॥؟۔]++[”’」』)]*+"
)
_LAST_WORD: Final = re.compile(r"[\w.]*\Z")
# Their full stop ends no sentence.
_TITLES: Final = frozenset(
    ("mr", "mrs", "ms", "dr", "prof", "st", "vs", "fig", "gen", "rev", "sen")
)
# Their full stop ends a sentence only before a capital letter.
_SHORT_FORMS: Final = frozenset(
    (
        "e.g",
        "i.e",
        "etc",
        "a.m",
        "p.m",
        "u.s",
        "u.k",
        "inc",
        "ltd",
        "co",
        "jr",
        "sr",
        "approx",
        "al",
    )
)
_LONGEST_SHORT_FORM: Final = 12
_DIVIDER: Final = re.compile(r"\s?(?:\*\*\*|\* \* \*)\s?")
_HIGHLIGHTS: Final = (re.compile(r"\*([^\n*]*)\*"), re.compile(r"\*\*([^\n*]*)\*\*"))


def count_words(text: str) -> int:
    """Return the number of words: runs of letters, digits and underscores."""
    return sum(1 for _ in _WORD.finditer(text))


def count_capital_words(text: str) -> int:
    """Return the number of words that hold letters, all of them capitals."""
    return sum(match[0].isupper() for match in _JOINED_WORD.finditer(text))


def count_phrase(text: str, phrase: str, *, whole: bool) -> int:
    """Return how often a phrase occurs, ignoring case; ``whole``: not as a part of a word."""
    pattern = re.escape(phrase)
    if whole:
        pattern = rf"(?<!\w){pattern}(?!\w)"
    return sum(1 for _ in re.finditer(pattern, text, re.IGNORECASE))


def count_sentences(text: str) -> int:
    """Return the number of sentences; a text without a mark at its end still ends a sentence.

    The full stop of an initial, of a title such as ``Dr.``, or behind the number of a list item
    ends none. Line ends alone end none either.
    """
    count = 0
    start = 0
    for match in _SENTENCE_END.finditer(text):
        if _is_sentence_end(text, match):
            count += 1
            start = match.end()
    return count + (re.search(r"\w", text[start:]) is not None)


def _is_sentence_end(text: str, match: re.Match[str]) -> bool:
    if match[0][0] != ".":
        return True
    head = text[max(0, match.start() - _LONGEST_SHORT_FORM) : match.start()]
    found = _LAST_WORD.search(head)
    word = found[0] if found is not None else ""
    following = text[match.end() : match.end() + 20].lstrip()
    if word.isdecimal():  # "1. First" at the start of a line
        return head[: len(head) - len(word)].rpartition("\n")[2].strip() != ""
    if word.lower() in _TITLES or (len(word) == 1 and word.isupper() and word != "I"):
        return not following
    if word.lower() in _SHORT_FORMS:
        return not following or following[0].isupper()
    return True


def count_placeholders(text: str) -> int:
    """Return the number of ``[...]``, each within a line."""
    count = 0
    for line in text.split("\n"):
        start = line.find("[")
        while start >= 0 and (end := line.find("]", start)) >= 0:
            count += 1
            start = line.find("[", end)
    return count


def count_bullets(text: str) -> int:
    """Return the number of lines that start with ``-``, or with one ``*``."""
    lines = [line.strip() for line in text.split("\n")]
    return sum(
        line.startswith("-") or (line[:1] == "*" and line[1:2] not in ("", "*")) for line in lines
    )


def count_highlights(text: str) -> int:
    """Return the number of ``*sections*`` and ``**sections**``, each within a line."""
    return sum(
        bool(match[1].strip()) for pattern in _HIGHLIGHTS for match in pattern.finditer(text)
    )


def count_sections(text: str, splitter: str) -> int:
    """Return how often the splitter stands before a number: ``Section 1``."""
    return sum(1 for _ in re.finditer(rf"{re.escape(splitter)}\s?\d++", text))


def split_divided(text: str) -> list[str]:
    """Return the paragraphs between dividers, ``***`` or ``* * *``; a blank end is none."""
    return _without_blank_ends(_DIVIDER.split(text))


def split_responses(text: str) -> list[str]:
    """Return the responses between six asterisks; a blank end is none."""
    return _without_blank_ends(text.split("******"))


def _without_blank_ends(parts: list[str]) -> list[str]:
    parts = [part.strip() for part in parts]
    first = 0 if parts[0] else 1
    return parts[first:] if parts[-1] else parts[first:-1]


def split_paragraphs(text: str) -> list[str]:
    """Return the paragraphs that blank lines separate."""
    return [part.strip() for part in text.split("\n\n") if part.strip()]


def first_word(text: str) -> str:
    """Return the first word in small letters, without quotes and from its first mark on."""
    words = text.split(maxsplit=1)
    word = words[0].lstrip("'\"") if words else ""
    return re.split(r"[.,?!'\"]", word, maxsplit=1)[0].lower()


def has_title(text: str) -> bool:
    """Return whether a line holds ``<<a title>>``."""
    for line in text.split("\n"):
        start = line.find("<<")
        end = line.rfind(">>")
        if 0 <= start < end and line[start : end + 2].lstrip("<").rstrip(">").strip():
            return True
    return False
