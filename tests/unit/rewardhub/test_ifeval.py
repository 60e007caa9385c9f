"""IFEval's 25 kinds of instructions: cases by hand that follow, violate, and stand at the edge."""

from __future__ import annotations

from typing import Any

import pytest

from rewardhub.rewards.constraints.ifeval import KINDS
from rewardhub.rewards.constraints.rows import Instruction

ENGLISH = "This is the story of a man and his dog, who were in the park."
GERMAN = "Das ist die Geschichte von einem Mann und seinem Hund, die im Park waren."
# Of each kind its arguments, texts that follow and texts that do not.
CASES: dict[str, list[tuple[dict[str, Any], list[str], list[str]]]] = {
    "keywords:existence": [
        (
            {"keywords": ["river", "boat"]},
            ["A boat on the river.", "RIVERS and Boats", "riverboat"],
            ["A boat.", "A bo at on the river", ""],
        ),
        # a keyword is a text, not a pattern
        ({"keywords": ["c++ (2.0)"]}, ["I like C++ (2.0)."], ["c++ (2x0)", "ccc (2.0)"]),
    ],
    "keywords:frequency": [
        (
            {"keyword": "sun", "frequency": 2, "relation": "at least"},
            ["Sun, sun.", "sunny sunshine"],
            ["one sun", "moon"],
        ),
        (
            {"keyword": "sun", "frequency": 2, "relation": "less than"},
            ["one sun", "moon"],
            ["Sun, sun."],
        ),
    ],
    "keywords:forbidden_words": [
        (
            {"forbidden_words": ["bad", "c++"]},
            ["A good day.", "badly", "abad", "c+ +"],
            ["Bad!", "so bad", "I use C++."],
        ),
    ],
    "keywords:letter_frequency": [
        # "Banana" has a, a, a
        (
            {"letter": "a", "let_frequency": 3, "let_relation": "at least"},
            ["Banana", "Aaa"],
            ["banan", "bbb"],
        ),
        (
            {"letter": "A", "let_frequency": 3, "let_relation": "less than"},
            ["banan"],
            ["Banana"],
        ),
    ],
    "language:response_language": [
        ({"language": "de"}, [GERMAN], [ENGLISH, "xyz qrs", "123"]),
        ({"language": "en"}, [ENGLISH], [GERMAN]),
    ],
    "length_constraints:number_sentences": [
        (
            {"num_sentences": 2, "relation": "at least"},
            ["One. Two.", "One! Two? Three", "Dr. Smith came. He left"],
            ["One.", "Dr. Smith came.", "1. First\n2. Second"],
        ),
        ({"num_sentences": 2, "relation": "less than"}, ["One.", "e.g. this"], ["One. Two."]),
    ],
    "length_constraints:number_paragraphs": [
        (
            {"num_paragraphs": 2},
            ["a\n***\nb", "a *** b", "***\na\n***\nb\n***", "a\n* * *\nb"],
            ["a", "a\n***\n***\nb", "a\n***\nb\n***\nc", "a\n\nb"],
        ),
    ],
    "length_constraints:number_words": [
        (
            {"num_words": 3, "relation": "at least"},
            ["one two three", "don't go"],  # don, t, go
            ["one two", "- - - -"],
        ),
        ({"num_words": 3, "relation": "less than"}, ["one two", "..."], ["one two three"]),
    ],
    "length_constraints:nth_paragraph_first_word": [
        (
            {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Then"},
            ["First.\n\nthen it ends", 'First.\n\n"Then," it ends', "First.\n\n\n\nThen. End"],
            ["First.\n\nNext", "Then it ends", "a\n\nThen\n\nc", "First.\n\nThence"],
        ),
        ({"num_paragraphs": 1, "nth_paragraph": 2, "first_word": "a"}, [], ["a"]),
        ({"num_paragraphs": 1, "nth_paragraph": 1, "first_word": "don't"}, ["Don't go"], ["Do"]),
    ],
    "detectable_content:number_placeholders": [
        (
            {"num_placeholders": 2},
            ["[name] lives at [address]", "[a][b]", "[]\n[]"],
            ["[name]", "[a\nb] [c]", "[[a] b", "]["],
        ),
    ],
    "detectable_content:postscript": [
        (
            {"postscript_marker": "P.S."},
            ["Bye.\nP.S. I know", "bye p. s. yes"],
            ["Bye.", "PS: yes", "P.S yes"],
        ),
        ({"postscript_marker": "P.P.S"}, ["Bye. P.P.S yes", "p. p. s."], ["P.S. yes"]),
        ({"postscript_marker": "Note (1):"}, ["x note (1): y"], ["Note 1: y"]),
    ],
    "detectable_format:number_bullet_lists": [
        (
            {"num_bullets": 2},
            ["* a\n* b", "- a\n  - b", "text\n\n\n* a\n- b\nend"],
            ["* a", "* a\n* b\n* c", "** a\n** b", "*\n*"],
        ),
        ({"num_bullets": 0}, ["none", "a * b"], ["- a"]),
    ],
    "detectable_format:constrained_response": [
        (
            {},
            ["My answer is yes.", "Well. My answer is maybe."],
            ["My answer is yes", "my answer is no.", "Yes."],
        ),
    ],
    "detectable_format:number_highlighted_sections": [
        (
            {"num_highlights": 2},
            ["*a* and *b*", "**a** and *b*", "**a b** c **d**"],
            ["*a*", "*a\nb* *c*", "** **", "* * *"],
        ),
    ],
    "detectable_format:multiple_sections": [
        (
            {"section_spliter": "Section", "num_sections": 2},
            ["Section 1\na\nSection 2\nb", "Section1 a Section2 b"],
            ["Section 1 a", "Section a Section b", "SECTION 1 SECTION 2"],
        ),
        ({"section_spliter": "(PART)", "num_sections": 1}, ["(PART) 1"], ["PART 1"]),
    ],
    "detectable_format:json_format": [
        (
            {},
            ['{"a": 1}', '```json\n{"a": [1, 2]}\n```', "```\n[]\n```", '"text"'],
            ["{a: 1}", '{"a": 1} and more', "```json\n{\n```", '{"a": NaN}', "[" * 100_000],
        ),
    ],
    "detectable_format:title": [
        (
            {},
            ["<<poem of joy>>\ntext", "text <<a>> b", "<<<a>>>"],
            ["<poem>", "<<>>", "<< >>", "<<a\nb>>", ">>a<<"],
        ),
    ],
    "combination:two_responses": [
        (
            {},
            ["one\n******\ntwo", "******one******two******"],
            ["one", "one ****** one", "a******b******c", "a************b", "******"],
        ),
    ],
    "combination:repeat_prompt": [
        (
            {"prompt_to_repeat": "Write a poem."},
            ["Write a poem. Roses are red.", "  WRITE A POEM.\nRoses"],
            ["Roses. Write a poem.", "Write a song."],
        ),
    ],
    "startend:end_checker": [
        (
            {"end_phrase": "That is all."},
            ["Yes. That is all.", '"Yes. THAT IS ALL."', "that is all.  \n"],
            ["That is all. Bye", "That is all"],
        ),
    ],
    "startend:quotation": [
        ({}, ['"Yes."', ' "a" and "b" '], ["Yes", '"', '"Yes', "'Yes'", "“Yes”"]),
    ],
    "change_case:capital_word_frequency": [
        (
            {"capital_frequency": 2, "capital_relation": "at least"},
            ["NASA and COVID-19", "I AM here", "THE U.S. army"],
            ["NASA and Esa", "Covid-19 NASA", "1 2 3"],
        ),
        (
            {"capital_frequency": 1, "capital_relation": "less than"},
            ["no capitals", "Words"],
            ["STOP it"],
        ),
    ],
    "change_case:english_capital": [
        (
            {},
            [ENGLISH.upper(), "HELLO WORLD!", "YES 123"],
            [ENGLISH, GERMAN.upper(), "ПРИВЕТ", "123"],
        ),
    ],
    "change_case:english_lowercase": [
        ({}, [ENGLISH.lower(), "hello world!"], [ENGLISH, GERMAN.lower(), "привет", "123"]),
    ],
    "punctuation:no_comma": [({}, ["No comma; none."], ["One, two", ","])],
}


def test_there_are_25_kinds_and_each_has_cases() -> None:
    assert len(KINDS) == 25
    assert set(CASES) == set(KINDS)
    assert all(kind.name == key.rpartition(":")[2] for key, kind in KINDS.items())


@pytest.mark.parametrize(
    ("key", "arguments", "text", "expected"),
    [
        (key, arguments, text, expected)
        for key, cases in CASES.items()
        for arguments, followed, violated in cases
        for expected, texts in ((True, followed), (False, violated))
        for text in texts
    ],
)
def test_instruction(key: str, arguments: dict[str, Any], text: str, *, expected: bool) -> None:
    assert Instruction(key, arguments).is_followed(text) is expected


@pytest.mark.parametrize("key", sorted(KINDS))
@pytest.mark.parametrize("text", ["", " ", "\n\n"])
def test_blank_text_follows_nothing(key: str, text: str) -> None:
    assert not Instruction(key, CASES[key][0][0]).is_followed(text)


# Runs of what patterns begin with or stop at, which make careless ones quadratic.
HOSTILE = [
    mark * 50_000
    for mark in (
        "*", "* ", "[", "]", "<", "<<", ">>", ".", ". ", '."', "\n", "\n ", " ", "a", "A ", "***",
        "******", "Section ", "Section 1", "{", '{"a":', "p. ", "-", "\u0300", "﷽", "\x00", "१",
        "\ud800", "İ", "ß",
    )
]  # fmt: skip


@pytest.mark.timeout(20)
@pytest.mark.parametrize("key", sorted(KINDS))
def test_no_text_hangs_a_check(key: str) -> None:
    """A quadratic pattern needs minutes for one of these."""
    instruction = Instruction(key, CASES[key][0][0])
    for text in HOSTILE:
        assert instruction.is_followed(text) in (True, False)
