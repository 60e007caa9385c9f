"""Finds the answer in a text, and reads it as a number, a formula or words. Pure, in linear time."""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import pairwise
from typing import Final

import msgspec

LONGEST_ANSWER: Final = 4000  # characters that are searched, from the end
LONGEST_NUMBER: Final = 60  # characters of a number that is read without the parser
LONGEST_LINE: Final = 200  # characters of a response that is only a formula
MANY_WORDS: Final = 5  # a text with more words is prose, in which the answer is searched for
BOXED: Final = re.compile(r"\\(?:boxed|fbox)\s*\{")
# Digits grouped by commas ("36,000", "36{,}000"), thin spaces or blanks; a tuple or a set is never one number.
_NUMBER: Final = re.compile(
    r"(?P<sign>[-+−]?)\s*(?:\\?[$€£¥])?\s*(?P<sign2>-?)"
    r"(?P<whole>\d{1,3}(?:(?:,|\{,\}|\\[,!; ]|[   ])\d{3})+|\d+)?(?P<part>\.\d+)?(?P<power>[eE][-+]?\d{1,2})?\.?"
)
# A single letter after a number is a variable, a word is a unit.
_NUMBER_WITH_UNIT: Final = re.compile(
    r"[-+−]?\s*+(?:\\?[$€£¥])?\s*+-?(?:[\d,]*+\.\d++|[\d,]*+(?<=\d))"
    r"(?:\s*%|\s*(?:km|cm|mm|kg|mg|lbs?|oz|ft|hr|ml|mph|°[CF]?)\b[/a-z²³]*|\s+(?P<word>[A-Za-z]{3,})[A-Za-z.,/ ]*)",
    re.IGNORECASE,
)
_DELIMITED: Final = re.compile(r"\\\(|\\\[|(?<!\\)\$.*?(?<!\\)\$|\\boxed|\\fbox", re.DOTALL)
_MATH: Final = re.compile(r"\\\(|\\\[|(?<!\\)\$")
_CONNECTED: Final = re.compile(r"(?:[\s$,;.&]|\\[()\[\],; ]|\\q?quad|\\text\s*\{\s*(?:and|or)\s*\}|and|or)*")
_EMPHASIS: Final = re.compile(r"(?<![\w)}*])(\*{1,3}|_{2,3}|`+)(?=\S)([^*`\n]*?\S)\1(?![\w({*])")
_COMMAND: Final = re.compile(r"\\[A-Za-z]+")
_TEXT_COMMAND: Final = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_TRIGONOMETRIC: Final = ("sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh")
_COMMANDS: Final = (*_TRIGONOMETRIC, "log", "ln", "exp", "pi")  # written with a backslash in LaTeX
_FUNCTIONS: Final = frozenset((*_COMMANDS, "sqrt", "max", "min", "gcd", "lcm", "det", "mod", "infty", "and", "or"))
_BARE_FUNCTION: Final = re.compile(
    rf"(?<![\\A-Za-z{{])({'|'.join(sorted(_COMMANDS, key=len, reverse=True))})(?![A-Za-z])"
)
_WORD_BEFORE_TERM: Final = re.compile(r"(?<![A-Za-z])([A-Za-z]{2,})\s+(?=[A-Za-z0-9$])")
_POWER: Final = re.compile(r"(?:\*\*|\^)\s*(-?\d+(?:\.\d+)?|\((-?\d+(?:\.\d+)?)\))")
_IMAGINARY: Final = re.compile(r"(?<=[\d)}])i(?![A-Za-z])")
_SAID: Final = re.compile(r"\banswer(?:\s+is)?\s*[:=]?\s*(.+)$", re.IGNORECASE)


class ExtractedAnswer(msgspec.Struct, frozen=True):
    """An answer to compare."""

    text: str
    bare: bool  # only the answer; else prose, in which it is searched for


def answer_of(text: str, marker: str) -> ExtractedAnswer:
    """Return the answer of a response or reference.

    After the last marker: the first line, or a box. Without a marker, all boxes: different ones form a set, unless
    they are in separate formulas with prose in between; then math-verify takes the last. Without boxes, a single line
    that is only a formula, else the whole text.
    """
    text = text[-LONGEST_ANSWER:]
    _, found, after = text.rpartition(marker) if marker else ("", "", text)
    if found and not BOXED.search(after):
        return ExtractedAnswer(strip_markup(next((line for line in after.splitlines() if line.strip()), "")), bare=True)
    text = after if found else text
    boxes = list(dict.fromkeys(boxed(text)))
    if len(boxes) == 1 or (boxes and _belong_together(text)):
        return ExtractedAnswer(", ".join(boxes), bare=True)  # the blank tells a set from digit groups
    line = strip_markup(text)
    if boxes or not line or "\n" in line or len(line) > LONGEST_LINE or _DELIMITED.search(line):
        return ExtractedAnswer(text, bare=False)
    return ExtractedAnswer(line, bare=not line or number(line) is not None or is_formula(line))


def boxed(text: str) -> list[str]:
    """Return the contents of the outermost closed boxes in order, each with a percent sign that follows it."""
    return [content for content, _, _ in _boxes(text)]


def _belong_together(text: str) -> bool:
    places = [(start, end) for _, start, end in _boxes(text)]
    between = [text[end:start] for (_, end), (start, _) in pairwise(places)]
    return _MATH.search(text) is None or all(_CONNECTED.fullmatch(part) for part in between)


def _boxes(text: str) -> list[tuple[str, int, int]]:
    """Return content, start and end of each outermost box."""
    found, position = [], 0
    while (start := BOXED.search(text, position)) is not None:
        depth, position = 1, start.end()
        while depth and position < len(text):
            char = text[position]
            # An escaped brace is part of a set, not of the markup.
            if char == "\\":
                position += 1
            depth += (char == "{") - (char == "}")
            position += 1
        if depth:
            break
        percent = re.match(r"\s*\$?\s*\\?%", text[position:])
        content = text[start.end() : position - 1].strip() + ("\\%" if percent else "")
        found.append((content, start.start(), position + (percent.end() if percent else 0)))
    return found


def strip_markup(text: str) -> str:
    """Return a line without Markdown and a final full stop; a ``*`` between factors stays."""
    text = text.strip()
    while (plain := _EMPHASIS.sub(r"\2", text)) != text:
        text = plain
    text = text.strip("*`").strip()
    return text.rstrip(".").rstrip() if not text.endswith("..") else text


def number(text: str) -> tuple[Fraction, bool] | None:
    """Return a plain decimal number and whether it has a decimal point; None for any other text."""
    text = text.strip().removeprefix("$").removesuffix("$") if text.count("$") == 2 else text.strip()
    found = _NUMBER.fullmatch(text.strip()) if len(text) <= LONGEST_NUMBER else None
    if found is None or not (found["whole"] or found["part"]):
        return None
    digits = re.sub(r"\D", "", found["whole"] or "0") + (found["part"] or "")
    value = Fraction(digits + (found["power"] or ""))
    return (-value if "-" in (found["sign"] + found["sign2"]).replace("−", "-") else value), found["part"] is not None


def same_number(gold: tuple[Fraction, bool], found: tuple[Fraction, bool], digits: int) -> bool:
    """Return whether two numbers are equal: rounded to ``digits`` decimals if one has a decimal point, else exactly."""
    if gold[1] or found[1]:
        # Rounding turns small numbers into zero, so the difference must also be small relative to the reference.
        near = abs(gold[0] - found[0]) <= abs(gold[0]) * relative_tolerance(digits)
        return near and round(gold[0], digits) == round(found[0], digits)
    return gold[0] == found[0]


def relative_tolerance(digits: int) -> Fraction:
    """Return the relative difference from the reference that is allowed with ``digits`` decimals."""
    return Fraction(10) ** (2 - digits)


def has_unit(text: str) -> bool:
    """Return whether the text is a number followed by a unit or a few words."""
    found = _NUMBER_WITH_UNIT.fullmatch(text)
    return found is not None and (found["word"] or "") not in _FUNCTIONS


def is_formula(text: str) -> bool:
    """Return whether the text can be a formula: its words are function names or short products of variables."""
    if not text or has_control_characters(text):
        return False
    plain = _COMMAND.sub(" ", _TEXT_COMMAND.sub(" ", text))
    words = re.findall(r"[A-Za-z]+", plain)
    if any(len(word) > 3 and word not in _FUNCTIONS for word in words):
        return False
    if any(found[1] not in _FUNCTIONS for found in _WORD_BEFORE_TERM.finditer(plain)):
        return False
    if "\\" in text or len(text) == 1:
        return True
    # "no", "left": letters alone are words unless they are one variable.
    is_text = any(len(word) == 3 and word not in _FUNCTIONS for word in words)
    return not is_text and re.fullmatch(r"[A-Za-z\s.,'!?]*", text) is None


def has_control_characters(text: str) -> bool:
    """Return whether the text holds control characters, which no formula has."""
    return any(ord(char) < 32 and char not in "\t\n\r" for char in text)


def is_prose(text: str) -> bool:
    """Return whether the text is long enough to search it for an answer."""
    return len(text.split()) > MANY_WORDS


def to_latex(text: str) -> str:
    """Return a formula as LaTeX for the parser: powers in braces, functions as commands, a separate i."""
    if "\\" not in text:
        text = _POWER.sub(lambda found: "^{" + (found[2] or found[1]) + "}", text).replace("**", "^")
        text = _BARE_FUNCTION.sub(r"\\\1 ", text)
        text = re.sub(r"(?<!\s)\s++(?:and|or)\s+", ", ", text)
    text = text.replace("−", "-").replace("·", "\\cdot ").replace("×", "\\times ")
    text = re.sub(r"√\s*\(([^()]*)\)|√\s*(\w+)", lambda found: "\\sqrt{" + (found[1] or found[2]) + "}", text)
    return imaginary(text)


def imaginary(text: str) -> str:
    """Return the text with the imaginary unit separated from its factor, for the parser."""
    return _IMAGINARY.sub(" i", text)


def words(text: str) -> str:
    """Return the text as words: without case, markup, extra blanks and punctuation at the ends."""
    text = _TEXT_COMMAND.sub(r"\1", text).replace("$", "").replace("\\", "")
    return " ".join(strip_markup(text).casefold().split()).strip(" .,;:!?\"'()")


def candidate_texts(answer: ExtractedAnswer) -> set[str]:
    """Return the texts that an answer may mean: all of it, its last line, or the text after "answer is" there."""
    found = {words(answer.text)}
    if not answer.bare and (lines := [line for line in answer.text.splitlines() if line.strip()]):
        last = strip_markup(lines[-1])
        found |= {words(last)} | ({words(match[1])} if (match := _SAID.search(last)) else set())
        if boxes := boxed(answer.text):
            found = {words(", ".join(boxes))}
    return found - {""}
