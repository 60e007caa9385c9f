"""Schemas as they guide: objects that name their properties are closed, wherever that changes
nothing of what is valid.
"""

from __future__ import annotations

from typing import Any

import pytest

from rlearner_text.openai.answer_guides import close_objects

CLOSED = {"additionalProperties": False}


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ({"type": "object"}, {"type": "object"}),
        ({"properties": {"a": {"properties": {}}}}, {"properties": {"a": {"properties": {}} | CLOSED}} | CLOSED),
        ({"properties": {}, "additionalProperties": True}, {"properties": {}, "additionalProperties": True}),
        ({"properties": {"properties": {"type": "string"}}},
            {"properties": {"properties": {"type": "string"}}} | CLOSED),
        ({"items": {"properties": {}}, "type": "array"}, {"items": {"properties": {}} | CLOSED, "type": "array"}),
        ({"anyOf": [{"properties": {}}, True]}, {"anyOf": [{"properties": {}} | CLOSED, True]}),
        ({"allOf": [{"properties": {}}, {"properties": {}}]}, {"allOf": [{"properties": {}}, {"properties": {}}]}),
        ({"$defs": {"p": {"properties": {}}}, "$ref": "#/$defs/p"}, {"$defs": {"p": {"properties": {}} | CLOSED},
            "$ref": "#/$defs/p"}),
        ({"enum": [{"properties": {}}]}, {"enum": [{"properties": {}}]}),
    ],
)  # fmt: skip
def test_objects_are_closed(given: dict[str, Any], made: dict[str, Any]) -> None:
    assert close_objects(given) == made
