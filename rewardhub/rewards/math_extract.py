"""Finds the answer in a response or a reference. Pure, in linear time."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Final, NamedTuple

import msgspec

from rewardhub.rewards import math_text
from rewardhub.rewards.thinking import Thinking, visible_text

# Characters that are searched, from the end.
LONGEST_ANSWER: Final = 4000
# Characters of a response that is only an answer.
LONGEST_LINE: Final = 200
# A text with more words is prose, in which the answer is searched for.
MANY_WORDS: Final = 5
BOXED: Final = re.compile(r"\\(?:boxed|fbox)(?:\s*\{|\s+(?=[-+]?\d))")
_BOXED_NUMBER: Final = re.compile(r"[-+]?[\d.,]*\d")
_DELIMITED: Final = re.compile(r"\\\(|\\\[|(?<!\\)\$.*?(?<!\\)\$|\\boxed|\\fbox", re.DOTALL)
_MATH: Final = re.compile(r"\\\(|\\\[|(?<!\\)\$")
# Formulas in prose; a formula between single dollars has no line end.
_FORMULA: Final = re.compile(
    r"(?<!\\)\$\$(?P<display>[^$]+)\$\$|\\\[(?P<bracket>(?:[^\\]|\\(?!\]))++)\\\]"
    r"|(?<!\\)\$(?P<inline>(?:\\\$|[^$\n])+)(?<!\\)\$|\\\((?P<round>(?:[^\\]|\\(?!\)))++)\\\)"
)
_ENVIRONMENT: Final = re.compile(
    r"(?:\\left\s*\\?[\[({"
    r"|.])?\s*\\begin\{(?P<name>[A-Za-z]+\*?)\}(?s:.)*\\end\{(?P=name)\}\s*(?:\\right\s*\\?[\])}"
    r"|.])?"
)
_PERCENT: Final = re.compile(r"\s*\$?\s*(?:\\?%|percent(?:age)?\b|pct\b)", re.IGNORECASE)
_CONNECTED: Final = re.compile(
    r"(?:[\s$,;.&]|[A-Za-z](?:_\{?\w\}?)?\s*=|\\[()\[\],; ]|\\q?quad"
    r"|\\text\s*\{(?:[^{}]*\s)?(?:and|or)\s*\}|and|or)*"
)
_SPECIAL_TOKEN: Final = re.compile(r"(?:<\|[\w/ ]{1,40}\|>|</s>|<eos>|<end_of_turn>)\Z")
_OPEN_TAG: Final = "<answer>"
_CLOSE_TAG: Final = "</answer>"
_STATED: Final = re.compile(
    r"\banswer\b(?:[^\n.:=$\\]{0,60}?\b(?:is|are|equals)\b(?:\s+for\s+sure)?"
    r"|[^\n.:=$\\]{0,40}?[:=])"
    r"[ \t]*[:=]?[ \t*_]*",
    re.IGNORECASE,
)
_SENTENCE_END: Final = re.compile(
    r"[.!?](?:\s+(?=[A-Z(])|\s*$)|[,;]\s+(?=[A-Za-z]{2})(?!and |or )|\n"
)


class ExtractedAnswer(msgspec.Struct, frozen=True):
    """An answer to compare."""

    text: str
    bare: bool  # only the answer; else prose, in which it is searched for


class _Box(NamedTuple):
    content: str
    start: int
    end: int


def answer_of(text: str, marker: str, thinking: Thinking = "drop") -> ExtractedAnswer:
    """Return the answer of a response or reference.

    After the last marker: the first line, or a box. Without a marker, all boxes: different ones
    form a set, unless they are in separate formulas with prose in between; then the last ones
    count. Without boxes, the text between the last ``<answer>`` tags, a single line that is only an
    answer, what the text says the answer is, or the last formula if no number follows it; else the
    whole text, whose last number counts.
    """
    # half of a surrogate pair cannot be sent to the process that compares
    text = visible_text(text, thinking)[-LONGEST_ANSWER:].encode("utf-8", "replace").decode()
    text = _without_end_tokens(text)
    _, is_marked, marked_text = text.rpartition(marker) if marker else ("", "", text)
    if is_marked and not BOXED.search(marked_text):
        line = next((line for line in marked_text.splitlines() if line.strip(" :*")), "")
        return ExtractedAnswer(strip_markup(line.lstrip(" :")), bare=True)
    text = _tagged_text(marked_text if is_marked else text)
    boxes = _find_boxes(text)
    if boxes and (stated := _final_answer(text[boxes[-1].end :])) is not None:
        return ExtractedAnswer(stated, bare=True)
    if boxes:
        contents = dict.fromkeys(box.content for box in _last_boxes(text, boxes))
        # the blank tells a set from digit groups
        return ExtractedAnswer(", ".join(contents), bare=True)
    line = strip_markup(text)
    if _is_only_answer(line):
        return ExtractedAnswer(line, bare=True)
    if (stated := _stated_answer(text)) is not None:
        return ExtractedAnswer(stated, bare=True)
    return ExtractedAnswer(text, bare=False)


def _without_end_tokens(text: str) -> str:
    """Return a text without the special tokens that end it."""
    text = text.rstrip()
    while (
        text.endswith(">")
        and (token := _SPECIAL_TOKEN.search(text, max(0, len(text) - 60))) is not None
    ):
        text = text[: token.start()].rstrip()
    return text


def _tagged_text(text: str) -> str:
    """Return the text between the last ``<answer>`` tags, or all of it."""
    head, is_closed, _ = text.rpartition(_CLOSE_TAG)
    _, is_open, content = (head if is_closed else text).rpartition(_OPEN_TAG)
    return content if is_open and (is_closed or content.strip()) else text


def _is_only_answer(line: str) -> bool:
    """Return whether a text is an answer and nothing else."""
    if _ENVIRONMENT.fullmatch(line):
        return True
    if not line or "\n" in line or len(line) > LONGEST_LINE:
        return not line
    if (formula := _FORMULA.fullmatch(line)) is not None:
        return "$" not in formula[0].strip("$").replace("\\$", "")
    if _DELIMITED.search(line):
        return False
    return (
        math_text.number(line) is not None or math_text.is_formula(line) or math_text.has_unit(line)
    )


def _stated_answer(text: str) -> str | None:
    """Return what the text says last that the answer is; None if that is no short answer."""
    places = list(_STATED.finditer(text))
    if not places:
        return None
    remainder = text[places[-1].end() :].lstrip()
    if (formulas := last_formulas(remainder, first=True)) is not None:
        return formulas
    candidate = strip_markup(_SENTENCE_END.split(remainder, maxsplit=1)[0])
    if not candidate or _DELIMITED.search(candidate):
        return None
    return candidate if len(candidate.split()) <= MANY_WORDS else None


def _final_answer(text: str) -> str | None:
    """Return what follows "final answer" after the last box, if that holds a number."""
    if "final answer" not in text.lower():
        return None
    stated = _stated_answer(text)
    return stated if stated is not None and re.search(r"\d", stated) else None


def last_formulas(text: str, *, first: bool = False) -> str | None:
    """Return the last formula of a text, with those that it is connected to by commas or "and".

    None if a digit follows it. With ``first``, the formulas that the text starts with instead, or
    None.
    """
    if first and not text.startswith(("$", "\\(", "\\[")):
        return None
    formulas = list(_FORMULA.finditer(text))
    if not formulas or (first and formulas[0].start() > 0):
        return None
    run = [formulas[0]] if first else [formulas[-1]]
    if first:
        for previous, following in pairwise(formulas):
            if not _CONNECTED.fullmatch(text[previous.end() : following.start()]):
                break
            run.append(following)
    else:
        for previous, following in reversed(list(pairwise(formulas))):
            if not _CONNECTED.fullmatch(text[previous.end() : following.start()]):
                break
            run.insert(0, previous)
    tail = text[run[-1].end() :]
    percent = _PERCENT.match(tail)
    if not first and re.search(r"\d", tail):
        return None
    contents = [
        next(group for group in match.groups() if group is not None).strip() for match in run
    ]
    return ", ".join(contents) + ("\\%" if percent else "")


def boxed(text: str) -> list[str]:
    """Return the contents of the outermost closed boxes, each with a percent sign behind it."""
    return [box.content for box in _find_boxes(text)]


def _last_boxes(text: str, boxes: list[_Box]) -> list[_Box]:
    """Return the boxes that count: all, or the last connected ones if prose separates formulas."""
    if _MATH.search(text) is None:
        return boxes
    start = len(boxes) - 1
    while start and _CONNECTED.fullmatch(text[boxes[start - 1].end : boxes[start].start]):
        start -= 1
    return boxes[start:]


def _find_boxes(text: str) -> list[_Box]:
    boxes: list[_Box] = []
    position = 0
    while (start := BOXED.search(text, position)) is not None:
        if start[0].endswith("{"):
            end = _closing_brace(text, start.end())
            if end is None:
                break
            content = text[start.end() : end - 1].strip()
        else:
            digits = _BOXED_NUMBER.match(text, start.end())
            end, content = (digits.end(), digits[0]) if digits else (start.end(), "")
        percent = _PERCENT.match(text, end)
        position = percent.end() if percent else end
        boxes.append(_Box(content + ("\\%" if percent else ""), start.start(), position))
    return boxes


def _closing_brace(text: str, position: int) -> int | None:
    """Return the position after the brace that closes a group, or None."""
    depth = 1
    while depth and position < len(text):
        char = text[position]
        # An escaped brace is part of a set, not of the markup.
        if char == "\\":
            position += 1
        depth += (char == "{") - (char == "}")
        position += 1
    return None if depth else position


def strip_markup(text: str) -> str:
    """Return a line without Markdown and a final full stop; a ``*`` between factors stays."""
    return math_text.strip_markup(text)


def is_prose(text: str) -> bool:
    """Return whether the text is long enough to search it for an answer."""
    return len(text.split()) > MANY_WORDS


def is_same_writing(gold: ExtractedAnswer, answer: ExtractedAnswer) -> bool:
    """Return whether an answer is written like the reference, or names the same choice."""
    if (letter := choice_of_reference(gold.text.strip())) is not None:
        return letter == choice_of_response(answer)
    if not (gold.bare and answer.bare):
        return False
    if gold.text.split() == answer.text.split():
        return True
    spellings = [
        math_text.canonical(math_text.plain_latex(answer.text[:LONGEST_ANSWER]))
        for answer in (gold, answer)
    ]
    return spellings[0] == spellings[1] != ""


def is_same_text(gold: ExtractedAnswer, answer: ExtractedAnswer) -> bool:
    """Return whether an answer has the words of the reference, or is written like it."""
    return bool(_candidate_texts(gold) & _candidate_texts(answer)) or is_same_writing(gold, answer)


def choice_of_reference(text: str) -> str | None:
    """Return the letter if the reference is a choice: A to J alone, or in brackets before text."""
    plain = math_text.TEXT_COMMAND.sub(r"\1", text).replace("$", "").strip()
    match = re.fullmatch(r"([A-J])[.)]?|\(([A-J])\)(?:\s.*)?", plain)
    return match and (match[1] or match[2])


def choice_of_response(answer: ExtractedAnswer) -> str | None:
    """Return the letter that an answer chooses, alone or at the end of prose; else None."""
    letter = math_text.choice(answer.text.strip())
    if letter is not None or answer.bare:
        return letter
    match = re.search(r"(?<![\w'])\(?([A-J])\)?\W*$", answer.text)
    return match[1] if match else None


def _candidate_texts(answer: ExtractedAnswer) -> set[str]:
    """Return the texts that an answer may mean: all of it, or its last line."""
    texts = {math_text.words(answer.text)}
    if not answer.bare and (lines := [line for line in answer.text.splitlines() if line.strip()]):
        texts |= {math_text.words(strip_markup(lines[-1]))}
    return texts - {""}
