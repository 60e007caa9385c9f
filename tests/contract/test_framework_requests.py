"""The requests that other libraries send by their defaults (``framework_requests.json``, long texts
cut) are answered in their form.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from http_kit import Api, api
from template_models import make_tokenizer_folder

REQUESTS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "kit" / "framework_requests.json").read_text()
)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tokenizer_folder(tmp_path_factory.mktemp("frameworks"), "hermes"))


@pytest.fixture
async def served(model_path: str) -> AsyncIterator[Api]:
    async with api(model_path, max_context_tokens=3000) as made:
        yield made


@pytest.mark.parametrize(
    "request_", REQUESTS, ids=[f"{number}-{one['from']}" for number, one in enumerate(REQUESTS)]
)
async def test_a_request_of_a_library_is_answered(served: Api, request_: dict[str, Any]) -> None:
    path, body = request_["path"], request_["body"] | {"stream": False, "seed": 1}
    answer = await served.post(path, body)
    forced = body.get("tool_choice") == "required"
    if path == "/responses":
        calls = [
            (item["name"], item["arguments"])
            for item in answer["output"]
            if item["type"] == "function_call"
        ]
        words = "".join(
            item["content"][0]["text"] for item in answer["output"] if item["type"] == "message"
        )
        form, names = (
            body.get("text", {}).get("format"),
            {tool["name"] for tool in body.get("tools", ())},
        )
    else:
        message = answer["choices"][0]["message"]
        calls = [
            (call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls", ())
        ]
        words = message["content"] or ""
        form, names = (
            body.get("response_format"),
            {tool["function"]["name"] for tool in body.get("tools", ())},
        )
    if form is not None:
        assert json.loads(words)["even"] in ("yes", "no")
    # whose answer may be any text, without end on a random engine
    if forced and request_["from"] != "smolagents_tools":
        ((name, arguments),) = calls
        assert (name in names, isinstance(json.loads(arguments), dict)) == (True, True)
