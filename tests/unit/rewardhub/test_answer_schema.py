"""Values against the part of JSON Schema that judges need, and schemas that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from broker.errors import ConfigError
from rewardhub.rewards.judges.answer_schema import check_object_schema, find_violation

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "score": {"type": "number", "minimum": 0, "maximum": 10},
        "stars": {"type": "integer", "enum": [1, 2, 3]},
        "safe": {"type": "boolean"},
        "reason": {"type": "string"},
    },
    "required": ["score"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"score": 7.5}, ""),
        ({"score": 10, "stars": 2, "safe": True, "reason": "x"}, ""),
        ({"score": 0, "stars": 2.0}, ""),
        (None, "it is not a JSON object"),
        ([1], "it is not a JSON object"),
        ({"stars": 2}, "'score' is missing"),
        ({"score": "7"}, "'score' must be of type number"),
        ({"score": True}, "'score' must be of type number"),
        ({"score": 11}, "'score' must be from 0 to 10"),
        ({"score": -0.5}, "'score' must be from 0 to 10"),
        ({"score": 1, "stars": 4}, "'stars' must be one of 1, 2, 3"),
        ({"score": 1, "stars": 1.5}, "'stars' must be of type integer"),
        ({"score": 1, "safe": 1}, "'safe' must be of type boolean"),
        ({"score": 1, "more": 1}, "'more' is no property of the schema"),
    ],
)
def test_violations(value: object, problem: str) -> None:
    check_object_schema("schema", SCHEMA)
    assert find_violation(value, SCHEMA) == problem


def test_other_properties_are_allowed_unless_the_schema_says_so() -> None:
    schema = {key: value for key, value in SCHEMA.items() if key != "additionalProperties"}
    assert find_violation({"score": 1, "more": [1]}, schema) == ""


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"type": "array"}, "schema.type: 'array' is not allowed; expected 'object'"),
        ({"properties": {}}, "schema.properties: {} is not allowed; expected a mapping of names "),
        ({"oneOf": []}, r"schema.oneOf: \[\] is not allowed; known here: type, properties"),
        (
            {"properties": {"score": {"type": "list"}}},
            "schema.properties.score.type: 'list' is not allowed; one of number, integer",
        ),
        (
            {"properties": {"score": {"type": "number", "minimum": "0"}}},
            "schema.properties.score.minimum: '0' is not allowed; expected a number",
        ),
        ({"properties": {"score": 3}}, "schema.properties.score: 3 is not allowed; expected a ma"),
        ({"required": ["grade"]}, r"schema.required: \['grade'\] is not allowed; expected a list"),
    ],
)
def test_refused_schemas(change: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=f"^{line}"):
        check_object_schema("schema", {**SCHEMA, **change})
