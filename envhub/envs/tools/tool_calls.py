"""Reads a tool call or an answer from a text, and scores answers.

A call is ``<name>…</name>``, as in Search-R1 (Jin et al. 2025, arXiv:2503.09516), or a
``<tool_call>`` that contains ``{"name": …, "arguments": {…}}``, as the chat templates of Hermes and
Qwen write it. The answer is ``<answer>…</answer>``. The first one in a text counts. An unclosed tag
extends to the end, as servers omit the stop string at which they stop.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final, Literal

import msgspec

ANSWER: Final = "answer"
_ARTICLES: Final = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION: Final = str.maketrans("", "", string.punctuation)
Score = Literal["exact", "f1"]


def parse(text: str, tool: str, argument: str) -> tuple[str, str] | None:
    """Return (``tool`` or ``answer``, its content without surrounding blanks), None without either.

    Args:
        tool: name of the tool.
        argument: name of its argument in calls written as JSON.
    """
    match = _call_pattern(tool).search(text)
    if match is None:
        return None
    name = match[1].lower()
    content = match[2].strip()
    if name == "tool_call":
        return _from_json(content, tool, argument)
    if not content:
        return None
    return name, content


def _from_json(text: str, tool: str, argument: str) -> tuple[str, str] | None:
    try:
        call: Any = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return None
    if (
        not isinstance(call, dict)
        or call.get("name") != tool
        or not isinstance(call.get("arguments"), dict)
    ):
        return None
    value = call["arguments"].get(argument)
    if not isinstance(value, str) or not value.strip():
        return None
    return tool, value.strip()


@lru_cache(maxsize=16)
def _call_pattern(tool: str) -> re.Pattern[str]:
    return re.compile(
        rf"<({re.escape(tool)}|{ANSWER}|tool_call)>(.*?)(?:</\1>|\Z)", re.DOTALL | re.IGNORECASE
    )


def plain(text: str) -> str:
    """Normalize as SQuAD: case, punctuation, articles, blanks (arXiv:1606.05250)."""
    bare = text.lower().translate(_PUNCTUATION)
    # an answer may be "A", or "+", of which nothing would be left
    return " ".join(_ARTICLES.sub(" ", bare).split()) or " ".join(bare.split()) or text.strip()


def exact(answer: str, references: Iterable[str]) -> float:
    """Return 1 if the answer is one of the references, up to ``plain``, else 0."""
    return float(plain(answer) in {plain(reference) for reference in references})


def f1(answer: str, references: Iterable[str]) -> float:
    """Return the best harmonic mean of the shares of words in common, 0 to 1."""
    return max(
        (_word_f1(plain(answer).split(), plain(reference).split()) for reference in references),
        default=0.0,
    )


def _word_f1(words: list[str], reference_words: list[str]) -> float:
    if not words or not reference_words:
        return float(words == reference_words)
    common = (Counter(words) & Counter(reference_words)).total()
    return 2 * common / (len(words) + len(reference_words))


def scored(answer: str, references: tuple[str, ...], metric: Score) -> tuple[float, bool]:
    """Return (the score, whether the answer is right)."""
    match = exact(answer, references)
    score = match if metric == "exact" else f1(answer, references)
    return score, match == 1.0
