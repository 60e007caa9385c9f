"""Tools of the Responses API: groups of functions, and those that no policy has. No network."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from template_models import make_tokenizer_folder

from broker.contract import wire
from rlearner_text.openai.answer_store import AnswerStore
from rlearner_text.openai.answers import AnswerChoice, AnswerWriter
from rlearner_text.openai.http_errors import HttpError
from rlearner_text.openai.request_bodies import parse
from rlearner_text.openai.response_events import ResponsesFormat
from rlearner_text.openai.response_tools import chat_tools, note_dropped
from rlearner_text.openai.responses import ResponsesBody, chat_of, items_of
from rlearner_text.tokenizer import Tokenizer

RUN = {"type": "function", "name": "run", "parameters": {"type": "object"}, "strict": False}
GROUP = {
    "type": "namespace",
    "name": "agents",
    "description": "Tools in the agents namespace.",
    "tools": [RUN | {"description": "spawns"}, RUN | {"name": "wait"}],
}


def names(tools: list[dict[str, Any]]) -> list[str]:
    return [tool["function"]["name"] for tool in chat_tools(tools)]


def test_functions_of_a_namespace_are_offered_by_both_names() -> None:
    assert names([RUN, GROUP]) == ["run", "agents.run", "agents.wait"]
    (_, function, _) = chat_tools([RUN, GROUP])
    assert function["function"] == {
        "name": "agents.run",
        "description": "spawns",
        "parameters": {"type": "object"},
    }


def test_a_search_of_the_provider_is_left_out_and_noted_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    note_dropped.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert names([{"type": "web_search", "external_web_access": True}, RUN]) == ["run"]
    (record,) = caplog.records
    assert "web_search" in record.getMessage()


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "computer_use_preview"}, "tools.0.type"),
        ({"type": "custom", "name": "patch"}, "tools.0.type"),
        ({"type": "namespace", "tools": []}, "tools.0.name"),
        ({"type": "namespace", "name": "a"}, "tools.0.tools"),
        ({"type": "namespace", "name": "a", "tools": [GROUP]}, "tools.0.tools.0.type"),
        ({"type": "namespace", "name": "a", "tools": [RUN | {"name": ""}]}, "tools.0.tools.0.name"),
    ],
)
def test_other_tools_are_refused(tool: dict[str, Any], param: str) -> None:
    with pytest.raises(HttpError) as caught:
        chat_tools([tool])
    assert (caught.value.status, caught.value.param) == (400, param)


def test_a_call_of_a_namespace_comes_and_goes_with_it(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(make_tokenizer_folder(tmp_path, "hermes"))
    raw = json.dumps({"input": "hello", "tools": [RUN, GROUP]}).encode()
    body = parse(raw, ResponsesBody)
    chat = chat_of(body, items_of(body, AnswerStore()))
    writer = AnswerWriter(chat, tokenizer, "actor", "1")
    calls = "".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>\n'
        for name in ("agents.run", "run")
    )
    ids = tokenizer.encode(calls)
    reply = wire.GenerateReply(
        request_id="x",
        server="s",
        token_ids=wire.column(ids, "<i4"),
        logprobs=wire.column([-0.5] * len(ids), "<f4"),
        finish_reason="stop",
        version_runs=wire.column([7, len(ids)], "<i4"),
        policy_version=7,
    )
    form = ResponsesFormat(body, chat, tokenizer, lambda *_: None, writer)
    output = form.whole([AnswerChoice(0, [4], reply)])["output"]
    assert [(item["name"], item.get("namespace")) for item in output] == [
        ("run", "agents"),
        ("run", None),
    ]
    result = {"type": "function_call_output", "call_id": output[0]["call_id"], "output": "ok"}
    items = [{"role": "user", "content": "hello"}, *output, result]
    again = parse(json.dumps({"input": items}).encode(), ResponsesBody)
    assistant = chat_of(again, items_of(again, AnswerStore())).messages[1]
    assert assistant.tool_calls is not None
    assert [call.function.name for call in assistant.tool_calls] == ["agents.run", "run"]
