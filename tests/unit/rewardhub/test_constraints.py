"""Instructions of rows in the forms of public data sets, and the lines that refuse others."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rewardhub.rewards.base import InvalidRowError
from rewardhub.rewards.constraints.rows import Instruction, read_instructions

WORDS = {"num_words": 300, "relation": "at least"}
NO_COMMA = Instruction("punctuation:no_comma", {})
MANY_WORDS = Instruction("length_constraints:number_words", WORDS)
IDS = ["punctuation:no_comma", "length_constraints:number_words"]
MULTI = [{"instruction_id": IDS, "kwargs": [None, {**WORDS, "keywords": None}]}]


@pytest.mark.parametrize(
    "row",
    [
        # google/IFEval; tables fill the arguments of other kinds with null
        {"instruction_id_list": IDS, "kwargs": [{"num_words": None}, {**WORDS, "letter": None}]},
        # NeMo Gym; tables turn whole numbers into floats
        {"instruction_id_list": IDS, "kwargs": [None, {**WORDS, "num_words": 300.0}]},
        {"instruction_id_list": IDS, "kwargs": json.dumps([{}, WORDS])},
        {"instruction_id_list": IDS, "kwargs": ["{}", json.dumps(WORDS)]},
        # allenai/IF_multi_constraints_upto5, whose texts are Python's
        {"ground_truth": str(MULTI)},
        {"ground_truth": json.dumps(MULTI)},
        {"ground_truth": [str(MULTI)]},
        {"ground_truth": json.dumps(MULTI[0])},
        # verl
        {"reward_model": {"ground_truth": MULTI}},
    ],
)
def test_rows_of_ids(row: dict[str, Any]) -> None:
    assert read_instructions(row) == [NO_COMMA, MANY_WORDS]


@pytest.mark.parametrize("wrap", [json.dumps, lambda truth: [json.dumps(truth)], dict])
def test_rows_of_functions(wrap: Any) -> None:
    # allenai/RLVR-IFeval names all arguments in each row
    truth = {"func_name": "verify_bullet_points", "N": 3, "quantifier": None, "word": None}
    expected = [Instruction("verify_bullet_points", {"N": 3})]
    assert read_instructions({"ground_truth": wrap(truth)}) == expected


def test_named_columns_and_one_id_as_text() -> None:
    row = {"extra": {"ids": "punctuation:no_comma"}, "ground_truth": "x"}
    assert read_instructions(row, "extra.ids") == [NO_COMMA]
    row = {"ids": [IDS[1]], "args": WORDS}
    assert read_instructions(row, "ids", "args") == [MANY_WORDS]


@pytest.mark.parametrize(
    ("row", "line"),
    [
        (
            {"a": 1},
            "no column instruction_id_list or ground_truth or reward_model.ground_truth; it has a",
        ),
        (
            {"instruction_id_list": ["keywords:none"]},
            "instruction 1: 'keywords:none' is not allowed; known: keywords:existence, ",
        ),
        (
            {"instruction_id_list": IDS, "kwargs": [{}]},
            "kwargs: expected a list of 2, one for each id, got 1",
        ),
        (
            {"instruction_id_list": IDS, "kwargs": 3},
            "kwargs: expected a list of 2, one for each id, got no list",
        ),
        (
            {"instruction_id_list": IDS, "kwargs": [{}, {**WORDS, "relation": "more than"}]},
            "instruction 2, length_constraints:number_words: kwarg relation: 'more than' is not "
            "allowed; input should be 'less than' or 'at least'",
        ),
        (
            {"instruction_id_list": IDS, "kwargs": [{}, {**WORDS, "num_words": "many"}]},
            "instruction 2, length_constraints:number_words: kwarg num_words: 'many' is not "
            "allowed; expected a whole number of at least 0",
        ),
        (
            {"instruction_id_list": IDS, "kwargs": [{}, {**WORDS, "num_words": -1}]},
            "kwarg num_words: -1 is not allowed; expected a whole number of at least 0",
        ),
        (
            {"instruction_id_list": IDS, "kwargs": [{}, {"relation": "at least"}]},
            "instruction 2, length_constraints:number_words: kwarg num_words is missing",
        ),
        (
            {"instruction_id_list": IDS, "kwargs": [{"num_words": 3}, WORDS]},
            "instruction 1, punctuation:no_comma: kwarg num_words is not allowed; known: none",
        ),
        (
            {"instruction_id_list": IDS, "kwargs": [[1], WORDS]},
            "instruction 1, punctuation:no_comma: kwargs: expected a mapping, got [1]",
        ),
        (
            {"instruction_id_list": ["language:response_language"], "kwargs": [{"language": "q"}]},
            "kwarg language: 'q' is not allowed; expected one of ar, bg, ",
        ),
        (
            {"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": ["a", " "]}]},
            "kwarg keywords.1: ' ' is not allowed; expected a text that is not blank",
        ),
        (
            {
                "instruction_id_list": ["keywords:letter_frequency"],
                "kwargs": [{"letter": "ab", "let_frequency": 1, "let_relation": "at least"}],
            },
            "kwarg letter: 'ab' is not allowed; string should have at most 1 character",
        ),
        ({"ground_truth": "{'a': 1}"}, "ground_truth: expected func_name, or instruction_id and "),
        ({"ground_truth": "{not json"}, "ground_truth: not JSON: "),
        ({"ground_truth": 7}, "ground_truth: expected ids of instructions, got 7"),
        ({"ground_truth": "[" * 5000}, "ground_truth: not JSON: "),
        (
            {"ground_truth": {"func_name": "verify_bullet_points", "N": 2.5}},
            "instruction 1, verify_bullet_points: kwarg N: 2.5 is not allowed; expected a whole ",
        ),
        ({"instruction_id_list": [], "ground_truth": []}, "no column instruction_id_list or "),
    ],
)
def test_refused_rows(row: dict[str, Any], line: str) -> None:
    with pytest.raises(InvalidRowError) as refusal:
        read_instructions(row)
    assert line in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_unknown_ids_are_left_out_on_demand() -> None:
    row = {"instruction_id_list": ["paragraphs:paragraphs", IDS[0]], "kwargs": [{}, {}]}
    assert read_instructions(row, skip_unknown=True) == [NO_COMMA]
    row = {"instruction_id_list": ["paragraphs:paragraphs"]}
    with pytest.raises(InvalidRowError, match="it holds no instruction of the 25 kinds"):
        read_instructions(row, skip_unknown=True)
