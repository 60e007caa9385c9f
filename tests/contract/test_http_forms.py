"""Forced calls, JSON of a schema, penalties and biases by HTTP, on engines that know how."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from http_kit import Api, api
from template_models import make_tokenizer_folder

ASK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "what is 2 + 3?"}],
    "max_tokens": 100,
}
SUM = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"$ref": "#/$defs/small"}},
    "required": ["a", "b"],
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": SUM
        | {"$defs": {"small": {"enum": [1, 2, 3]}}, "additionalProperties": False},
    },
}
STOP = {"type": "function", "function": {"name": "stop"}}
FORM = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "schema": {"type": "array", "items": {"type": "boolean"}, "maxItems": 4},
    },
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tokenizer_folder(tmp_path_factory.mktemp("forms"), "hermes"))


@pytest.fixture
async def served(model_path: str) -> AsyncIterator[Api]:
    async with api(model_path, max_context_tokens=400) as made:
        yield made


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"add", "stop"}), ({"type": "function", "function": {"name": "add"}}, {"add"})],
    ids=["any", "named"],
)
async def test_a_call_that_is_required_is_made(
    served: Api, choice: object, names: set[str]
) -> None:
    found = set()
    for seed in range(8):
        (one,) = (
            await served.post(
                "/chat/completions",
                ASK | {"tools": [ADD, STOP], "tool_choice": choice, "seed": seed},
            )
        )["choices"]
        assert (one["finish_reason"], one["message"]["content"]) == ("tool_calls", None)
        (call,) = one["message"]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        assert (
            arguments == {}
            if call["function"]["name"] == "stop"
            else (arguments["b"] in (1, 2, 3) and arguments["a"] <= 99)
        )
        found.add(call["function"]["name"])
    assert found == names


async def test_an_answer_is_json_of_its_schema_or_a_call(served: Api) -> None:
    kinds = set()
    for seed in range(8):
        (one,) = (
            await served.post(
                "/chat/completions", ASK | {"tools": [STOP], "response_format": FORM, "seed": seed}
            )
        )["choices"]
        if one["finish_reason"] == "stop":
            assert all(isinstance(each, bool) for each in json.loads(one["message"]["content"]))
        kinds.add(one["finish_reason"])
    assert kinds == {"stop", "tool_calls"}
    (any_object,) = (
        await served.post(
            "/chat/completions",
            ASK | {"response_format": {"type": "json_object"}, "logit_bias": {"7": -100}},
        )
    )["choices"]
    assert any_object["message"]["content"].startswith("{")


async def test_a_response_has_a_form_too_and_streams_it(served: Api) -> None:
    text = {
        "format": {
            "type": "json_schema",
            "name": "answer",
            "schema": FORM["json_schema"]["schema"],
            "strict": True,
        }
    }
    answer = await served.post("/responses", {"input": "hello", "text": text, "seed": 3})
    whole = answer["output"][0]["content"][0]["text"]
    assert all(isinstance(one, bool) for one in json.loads(whole))
    async with served.client.post(
        served.address + "/responses",
        json={"input": "hello", "text": text, "seed": 3, "stream": True},
    ) as response:
        lines = [line for line in (await response.text()).splitlines() if line.startswith("data: ")]
    deltas = [
        event
        for line in lines
        if (event := json.loads(line.removeprefix("data: ")))["type"]
        == "response.output_text.delta"
    ]
    assert "".join(event["delta"] for event in deltas) == whole
    called = await served.post(
        "/responses",
        {
            "input": "hello",
            "tools": [{"type": "function", **STOP["function"]}],
            "tool_choice": "required",
        },
    )
    assert [(item["type"], item["name"]) for item in called["output"]] == [
        ("function_call", "stop")
    ]


DEEP: dict[str, Any] = {}
for _ in range(450):
    DEEP = {"items": DEEP}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format: its schema cannot be compiled to a grammar",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": DEEP}}},
            "response_format: ",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"enum": ["x" * 70_000]}},
                }
            },
            "response_format: schemas of 70014 characters are not allowed; at most 65536",
        ),
        ({"tool_choice": "required"}, "tool_choice requires a call"),
        (
            {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
            "tool_choice requires a call",
        ),
        ({"logit_bias": {"99999": 1}}, "logit_bias: 99999 is not allowed; token ids below"),
    ],
    ids=["schema", "deep", "large", "no tools", "no such tool", "no such token"],
)
async def test_a_form_that_cannot_be_kept_is_refused(
    served: Api, fields: dict[str, Any], says: str
) -> None:
    answer = await served.post("/chat/completions", ASK | fields, 400)
    assert says in answer["error"]["message"]
    assert "\n" not in answer["error"]["message"]
