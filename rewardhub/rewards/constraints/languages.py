"""Finds the language of a text: by its script, and among languages of one script by its words.

The share of frequent words that every longer text has (``the``, ``and``) decides; a letter that
only one of the languages has counts half a word. No model and no package is needed, and equal texts
give equal answers. Nonsense, or a few words without such a word among them, has no language.
"""

from __future__ import annotations

import unicodedata
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from typing import Final

from rewardhub.rewards.constraints.language_words import FREQUENT_WORDS, OWN_LETTERS

LANGUAGES: Final = {
    "ar": "Arabic", "bg": "Bulgarian", "bn": "Bengali", "de": "German", "el": "Greek",
    "en": "English", "es": "Spanish", "fa": "Persian", "fi": "Finnish", "fr": "French",
    "gu": "Gujarati", "he": "Hebrew", "hi": "Hindi", "id": "Indonesian", "it": "Italian",
    "ja": "Japanese", "kn": "Kannada", "ko": "Korean", "ml": "Malayalam", "mr": "Marathi",
    "ne": "Nepali", "nl": "Dutch", "pa": "Punjabi", "pl": "Polish", "pt": "Portuguese",
    "ru": "Russian", "sv": "Swedish", "sw": "Swahili", "ta": "Tamil", "te": "Telugu",
    "th": "Thai", "tr": "Turkish", "uk": "Ukrainian", "ur": "Urdu", "vi": "Vietnamese",
    "zh": "Chinese",
}  # fmt: skip
# First character, last character, and the script's only language or its name.
_RANGES: Final = (
    (0x41, 0x5A, "Latin"), (0x61, 0x7A, "Latin"), (0xC0, 0x24F, "Latin"), (0x370, 0x3FF, "el"),
    (0x400, 0x52F, "Cyrillic"), (0x590, 0x5FF, "he"), (0x600, 0x6FF, "Arabic"),
    (0x750, 0x77F, "Arabic"), (0x900, 0x97F, "Devanagari"), (0x980, 0x9FF, "bn"),
    (0xA00, 0xA7F, "pa"), (0xA80, 0xAFF, "gu"), (0xB80, 0xBFF, "ta"), (0xC00, 0xC7F, "te"),
    (0xC80, 0xCFF, "kn"), (0xD00, 0xD7F, "ml"), (0xE00, 0xE7F, "th"), (0x1100, 0x11FF, "ko"),
    (0x1E00, 0x1EFF, "Latin"), (0x1F00, 0x1FFF, "el"), (0x3040, 0x30FF, "ja"),
    (0x3130, 0x318F, "ko"), (0x3400, 0x9FFF, "zh"), (0xAC00, 0xD7AF, "ko"),
    (0xFB50, 0xFDFF, "Arabic"), (0xFE70, 0xFEFF, "Arabic"),
)  # fmt: skip
_STARTS: Final = [start for start, _, _ in _RANGES]
_SHARED: Final = {
    "Latin": ("de", "en", "es", "fi", "fr", "id", "it", "nl", "pl", "pt", "sv", "sw", "tr", "vi"),
    "Cyrillic": ("bg", "ru", "uk"),
    "Arabic": ("ar", "fa", "ur"),
    "Devanagari": ("hi", "mr", "ne"),
}
# Of the letters: names and quotations of another script are allowed.
MIN_SCRIPT_SHARE: Final = 0.7
# Of Chinese characters and kana together; Japanese has more, Chinese none.
MIN_KANA_SHARE: Final = 0.1
MIN_WORD_SHARE: Final = 0.08
_PUNCTUATION: Final = " .,;:!?\"'()[]{}<>*_#`~“”‘’«»„¿¡…–—-/\\|،؛؟۔।॥"


def find_language(text: str) -> str:
    """Return the code of the language that a text is written in, empty if none is found."""
    text = unicodedata.normalize("NFC", text).lower()
    script = _main_script(text)
    if script not in _SHARED:
        return script
    tokens = Counter(text.split())
    words = Counter[str]()
    for token, count in tokens.items():
        word = token.strip(_PUNCTUATION)
        words[word] += count * any(map(str.isalpha, word))
    shares = {language: _word_share(words, language) for language in _SHARED[script]}
    best, second = sorted(shares.values(), reverse=True)[:2]
    if best < MIN_WORD_SHARE or best == second:
        return ""
    return max(shares, key=lambda language: shares[language])


def is_english(text: str) -> bool:
    """Return whether a text can be English: Latin letters, and no other language found."""
    if find_language(text) not in ("en", ""):
        return False
    return _main_script(text) == "Latin"


def language_code(name: str) -> str:
    """Return the code of a language that is named by its code or its English name.

    Raises:
        ValueError: if it is not one of ``LANGUAGES``; lists them.
    """
    codes = {english.lower(): code for code, english in LANGUAGES.items()}
    lower = name.strip().lower()
    code = codes.get(lower, lower)
    if code not in LANGUAGES:
        raise ValueError(f"expected one of {', '.join(LANGUAGES)}")
    return code


def _main_script(text: str) -> str:
    """Return the script of most letters, or its only language; empty if none prevails."""
    counts = Counter[str]()
    for char, count in Counter(text).items():
        counts[_script_of(char)] += count * char.isalpha()
    total = counts.total()
    if counts["ja"] >= MIN_KANA_SHARE * (counts["ja"] + counts["zh"]):
        counts["ja"] += counts.pop("zh", 0)
    if not total:
        return ""
    script, count = max(counts.items(), key=lambda entry: entry[1])
    return script if count >= MIN_SCRIPT_SHARE * total else ""


def _script_of(char: str) -> str:
    index = bisect_right(_STARTS, ord(char)) - 1
    if index < 0 or ord(char) > _RANGES[index][1]:
        return ""
    return _RANGES[index][2]


def _word_share(words: Mapping[str, int], language: str) -> float:
    """Return the share of frequent words, and half that of words with a letter of its own."""
    frequent = FREQUENT_WORDS[language]
    letters = OWN_LETTERS.get(language, frozenset())
    hits = 0.0
    for word, count in words.items():
        if word in frequent:
            hits += count
        elif not letters.isdisjoint(word):
            hits += count / 2
    return hits / max(sum(words.values()), 1)
