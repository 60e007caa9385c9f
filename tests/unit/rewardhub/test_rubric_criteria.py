"""Parts of the reward by hand, rubrics in the forms of public rows, and contradictions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from broker.errors import ConfigError
from rewardhub.rewards.base import InvalidRowError
from rewardhub.rewards.judges.rubric_criteria import CriterionSection, make_rubric, read_rubric

GOOD = CriterionSection(name="good", text="It is good.", weight=3)
BRIEF = CriterionSection(name="brief", text="It is brief.", low=1, high=5)
RUDE = CriterionSection(name="rude", text="It is rude.", weight=-2, high=1)


def test_parts_are_shares_of_the_positive_weights() -> None:
    rubric = make_rubric([GOOD, BRIEF, RUDE], None, 0, 10)
    # positive weights 3 + 1 = 4: 3/4 * 8/10, 1/4 * (2 - 1)/(5 - 1), -2/4 * 1/1
    parts = rubric.parts({"good": 8, "brief": 2, "rude": 1})
    assert parts == pytest.approx({"good": 0.6, "brief": 0.0625, "rude": -0.5})
    assert sum(rubric.parts({"good": 10, "brief": 5, "rude": 0}).values()) == pytest.approx(1.0)


def test_own_schema_of_the_criteria() -> None:
    schema = make_rubric([GOOD, BRIEF], None, 0, 10).schema
    assert schema == {
        "type": "object",
        "properties": {
            "reason": {"type": "string"},
            "good": {"type": "number", "minimum": 0, "maximum": 10},
            "brief": {"type": "number", "minimum": 1, "maximum": 5},
        },
        "required": ["reason", "good", "brief"],
        "additionalProperties": False,
    }


def make_schema(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def test_scores_are_scaled_by_the_range_of_a_given_schema() -> None:
    schema = make_schema(
        good={"type": "boolean"},
        brief={"type": "integer", "minimum": 1, "maximum": 5},
        why={"type": "string"},
    )
    rubric = make_rubric([GOOD, BRIEF], schema, 0, 10)
    # 3/4 * 1 and 1/4 * (4 - 1)/(5 - 1)
    assert rubric.parts({"good": True, "brief": 4}) == pytest.approx(
        {"good": 0.75, "brief": 0.1875}
    )
    levels = make_schema(good={"type": "number", "enum": [2, 4, 6]})
    assert make_rubric([GOOD], levels, 0, 10).parts({"good": 4}) == {"good": 0.5}


NUMBER = {"type": "number", "minimum": 0, "maximum": 10}


@pytest.mark.parametrize(
    ("criteria", "schema", "line"),
    [
        ([], None, "criteria: 0 is not allowed; expected 1 to 64 criteria"),
        ([GOOD, GOOD], None, "criteria.1.name: 'good' is not allowed; another criterion has that"),
        ([RUDE], None, r"criteria: \[-2.0\] is not allowed; one weight must be > 0"),
        (
            [CriterionSection(name="cost", text="x")],
            None,
            "criteria.0.name: 'cost' is not allowed; a printable name, and none of reason, ",
        ),
        (
            [CriterionSection(name="a", text="x", weight=0)],
            None,
            "criteria.0.weight: 0.0 is not allowed; it must not be 0",
        ),
        (
            [CriterionSection(name="a", text="x", high=0)],
            None,
            "criteria.0.high: 0.0 is not allowed; it must be above low, which is 0",
        ),
        (
            [GOOD, BRIEF],
            make_schema(good=NUMBER),
            "criteria.1.name: 'brief' is not allowed; the schema has only good",
        ),
        (
            [GOOD],
            make_schema(good=NUMBER, brief=NUMBER),
            "schema.properties.brief: 'number' is not allowed; no criterion has that name",
        ),
        (
            [GOOD],
            {**make_schema(good=NUMBER), "required": []},
            r"schema.required: \[\] is not allowed; the criterion 'good' must be in it",
        ),
        (
            [GOOD],
            make_schema(good={"type": "string"}),
            "schema.properties.good.type: 'string' is not allowed; a criterion is a number or a ",
        ),
        (
            [GOOD],
            make_schema(good={"type": "number", "minimum": 0}),
            "schema.properties.good: .* it needs minimum and maximum, or an enum of numbers",
        ),
        (
            [GOOD],
            make_schema(good={"type": "number", "minimum": 3, "maximum": 3}),
            "schema.properties.good.maximum: 3 is not allowed; it must be above minimum, which",
        ),
        (
            [BRIEF],
            make_schema(brief=NUMBER),
            "criteria.0.low: 1.0 is not allowed; the schema says 0 for 'brief'",
        ),
    ],
)
def test_contradictions(
    criteria: list[CriterionSection], schema: dict[str, Any] | None, line: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{line}") as refusal:
        make_rubric(criteria, schema, 0, 10)
    assert "\n" not in str(refusal.value)


RAR = [
    {"title": "Names the cause", "description": "Essential: names the cause.", "weight": 5},
    {"title": "No false cure", "description": "Pitfall: names a cure.", "weight": -1},
]
HEALTH = [
    {"criterion": "Names the cause.", "points": 5, "tags": ["a"]},
    {"criterion": "Names a cure.", "points": -1, "tags": []},
]


@pytest.mark.parametrize("value", [RAR, json.dumps(RAR), HEALTH, {"criteria": HEALTH}])
def test_rubrics_of_public_rows(value: Any) -> None:
    rubric = read_rubric(value, 0, 1)
    assert [criterion.name for criterion in rubric.criteria] == ["criterion_1", "criterion_2"]
    # only 5 is positive
    parts = rubric.parts({"criterion_1": 1, "criterion_2": 1})
    assert parts == {"criterion_1": 1.0, "criterion_2": -0.2}


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (3, "expected a list of criteria, got 3"),
        ("{", "expected a list of criteria, not JSON: "),
        ({"criteria": [{"name": "a"}]}, "criteria.0.text: None is not allowed; it must be given"),
        ([{"text": "x", "weight": "3"}], "criteria.0.weight: '3' is not allowed; "),
        ({"criteria": RAR, "schema": 1}, "schema: expected a mapping, got 1"),
        (
            {"criteria": RAR, "schema": make_schema(criterion_1=NUMBER)},
            "criteria.1.name: 'criterion_2' is not allowed; the schema has only criterion_1",
        ),
    ],
)
def test_refused_rows(value: Any, line: str) -> None:
    with pytest.raises(InvalidRowError) as refusal:
        read_rubric(value, 0, 1)
    assert str(refusal.value).startswith(line)
