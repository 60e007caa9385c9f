"""The functions of RLVR-IFeval: their names, their arguments, and where they differ from IFEval."""

from __future__ import annotations

from typing import Any

import pytest

from rewardhub.rewards.constraints.ifeval import KINDS
from rewardhub.rewards.constraints.rlvr import FUNCTIONS
from rewardhub.rewards.constraints.rows import Instruction

TEN_WORDS = "one two three four five six seven eight nine ten"
# Name, arguments, texts that follow and texts that do not.
CASES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    ("verify_keywords", {"keyword_list": ["a", "b"]}, ["B a"], ["a"]),
    ("verify_keyword_frequency", {"word": "cat", "N": 1}, ["One CAT, category"], ["cat cat", "-"]),
    ("validate_forbidden_words", {"forbidden_words": ["bad"]}, ["badly"], ["bad"]),
    ("verify_letter_frequency", {"letter": "a", "N": 2}, ["banA a"], ["Aa", "aaa"]),
    ("validate_response_language", {"language": "German"}, ["Das ist ein Hund und"], ["It is a"]),
    ("verify_paragraph_count", {"N": 2}, ["a\n* * *\nb"], ["a", "a * * * b * * * c"]),
    # within a tenth of ten words: nine to eleven
    (
        "validate_word_constraint",
        {"N": 10, "quantifier": "around"},
        [TEN_WORDS, TEN_WORDS + " eleven"],
        [TEN_WORDS + " eleven twelve", "one"],
    ),
    ("validate_word_constraint", {"N": 2, "quantifier": "at most"}, ["a b"], ["a b c"]),
    ("validate_word_constraint", {"N": 2, "quantifier": "at least"}, ["a b"], ["don't"]),
    (
        "verify_sentence_constraint",
        {"N": 2, "quantifier": "around"},
        ["A cat.", "Yes. No. So."],
        ["Yes. No. So. Go."],
    ),
    (
        "validate_paragraphs",
        {"N": 2, "first_word": "then", "i": 2},
        ["First.\n\nThen, end"],
        ["Then\n\nfirst", "then"],
    ),
    ("verify_postscript", {"postscript_marker": "P.S."}, ["x P.S. y"], ["x P.S.", "x p.s. y"]),
    ("validate_placeholders", {"N": 1}, ["[a]", "[a] [b]"], ["a"]),
    ("verify_bullet_points", {"N": 1}, ["* a"], ["* a\n* b"]),
    ("validate_title", {}, ["<<a>>"], ["a"]),
    ("validate_choice", {"options": ["yes", "no"]}, ["I say yes"], ["Yes"]),
    ("validate_choice", {"options": "maybe"}, ["maybe"], ["yes"]),
    ("validate_highlighted_sections", {"N": 2}, ["*a* *b*"], ["*a*"]),
    ("validate_sections", {"N": 1, "section_splitter": "Part"}, ["Part 1"], ["Part"]),
    ("validate_json_format", {}, ["{}"], ["x"]),
    ("validate_repeat_prompt", {"original_prompt": "Say it."}, ["Say it. It"], ["It. Say it."]),
    ("validate_two_responses", {}, ["a ****** b"], ["a ****** a"]),
    ("validate_uppercase", {}, ["THE DOG"], ["The dog"]),
    ("validate_lowercase", {}, ["the dog"], ["The dog"]),
    # within one of two words: a tenth, at least one
    (
        "validate_frequency_capital_words",
        {"N": 2, "quantifier": "around"},
        ["NASA", "A B C"],
        ["A B C D", "none"],
    ),
    ("validate_end", {"end_phrase": "Bye."}, ["x bye."], ["Bye. x"]),
    ("validate_quotation", {}, ['"a"'], ["a"]),
    ("validate_no_commas", {}, ["a"], ["a,"]),
]


def test_each_function_is_one_of_the_25_kinds() -> None:
    names = {kind.name for kind in KINDS.values()}
    assert {kind.name for kind in FUNCTIONS.values()} == names
    assert len(FUNCTIONS) == len(KINDS) == 25
    assert {name for name, *_ in CASES} == set(FUNCTIONS)


@pytest.mark.parametrize(
    ("name", "arguments", "text", "expected"),
    [
        (name, arguments, text, expected)
        for name, arguments, followed, violated in CASES
        for expected, texts in ((True, followed), (False, violated))
        for text in texts
    ],
)
def test_function(name: str, arguments: dict[str, Any], text: str, *, expected: bool) -> None:
    checked = FUNCTIONS[name].args(**arguments).model_dump()
    assert Instruction(name, checked).is_followed(text) is expected
