"""Bodies of /v1/messages become chats. No network."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from rlearner_text.anthropic.messages import MessagesBody, MessagesChat, PromptBody, chat_of
from rlearner_text.openai import response_tools
from rlearner_text.openai.http_errors import HttpError
from rlearner_text.openai.request_bodies import parse

HELLO = [{"role": "user", "content": "hello"}]
ADD = {"name": "add", "description": "adds", "input_schema": {"type": "object"}}


def body_of(**fields: Any) -> MessagesBody:
    body = {"model": "m", "max_tokens": 9, "messages": HELLO} | fields
    return parse(json.dumps(body).encode(), MessagesBody)


def chat(**fields: Any) -> MessagesChat:
    return chat_of(body_of(**fields))


def test_fields_of_sampling_and_the_system_prompt() -> None:
    made = chat(
        system="be brief", temperature=0.5, top_p=0.9, top_k=5, stop_sequences=["\n\n", "END"]
    )
    assert [message.plain() for message in made.messages] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
    ]
    assert (made.temperature, made.top_p, made.top_k, made.max_tokens) == (0.5, 0.9, 5, 9)
    assert made.stops == ["\n\n", "END"]


def test_what_clients_send_for_features_in_beta_is_accepted() -> None:
    made = chat(
        betas=["x-2026-01-01"],
        metadata={"user_id": "u"},
        context_management={"edits": [{"type": "clear_thinking_20251015"}]},
        output_config={"effort": "high"},
        service_tier="auto",
        container=None,
        mcp_servers=[],
        speed="fast",
        invented_tomorrow={"a": [1]},
        cache_control={"type": "ephemeral"},
    )
    assert [message.plain() for message in made.messages] == HELLO


def test_tools_become_functions() -> None:
    made = chat(tools=[{"type": "custom", **ADD, "strict": True, "cache_control": {}}, ADD])
    function = {"name": "add", "description": "adds", "parameters": {"type": "object"}}
    assert made.offered == [{"type": "function", "function": function}] * 2
    bare = chat(tools=[{"name": "add", "input_schema": {}}])
    assert bare.offered == [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def test_deferred_tools_are_described_where_a_search_has_found_them() -> None:
    reference = {"type": "tool_reference", "tool_name": "add"}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [reference]}
    made = chat(
        tools=[ADD | {"defer_loading": True}, {"name": "search", "input_schema": {}}],
        messages=[{"role": "user", "content": [result]}],
    )
    assert [tool["function"]["name"] for tool in made.offered] == ["search"]
    definition = '{"name": "add", "description": "adds", "parameters": {"type": "object"}}'
    assert made.messages[0].text == f"<function>{definition}</function>"


@pytest.mark.parametrize(
    ("choice", "forced", "callable_tools", "most_calls"),
    [
        ({"type": "auto"}, False, ["add", "sub"], None),
        ({"type": "auto", "disable_parallel_tool_use": True}, False, ["add", "sub"], 1),
        ({"type": "any"}, True, ["add", "sub"], None),
        ({"type": "tool", "name": "sub"}, True, ["sub"], None),
        ({"type": "none"}, False, [], None),
    ],
)
def test_tool_choices(
    choice: dict[str, Any], forced: bool, callable_tools: list[str], most_calls: int | None
) -> None:
    made = chat(tools=[ADD, ADD | {"name": "sub"}], tool_choice=choice)
    assert (made.forced, made.most_calls) == (forced, most_calls)
    assert [tool["function"]["name"] for tool in made.callable_tools] == callable_tools


def test_tools_of_the_provider_are_left_out_and_noted_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    response_tools.note_dropped.cache_clear()
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    with caplog.at_level(logging.WARNING):
        offered = [chat(tools=[search, ADD]).offered for _ in range(2)]
    assert [[tool["function"]["name"] for tool in tools] for tools in offered] == [["add"]] * 2
    assert [record.getMessage() for record in caplog.records] == [
        "tools of type web_search_20250305 run at the provider of a model; none is offered here"
    ]


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_a_format_of_the_answer(field: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    output_format = {"type": "json_schema", "schema": schema}
    value = {"format": output_format} if field == "output_config" else output_format
    assert chat(**{field: value}).response_format.wanted == schema


@pytest.mark.parametrize(
    ("thinking", "shows", "omits"),
    [
        (None, False, False),
        ({"type": "disabled"}, False, False),
        ({"type": "enabled", "budget_tokens": 1024}, True, False),
        ({"type": "adaptive", "display": "omitted"}, True, True),
    ],
)
def test_reasoning_is_shown_on_request(
    thinking: dict[str, Any] | None, shows: bool, omits: bool
) -> None:
    body = body_of(thinking=thinking)
    assert (body.shows_thinking, body.omits_thinking) == (shows, omits)


def test_counting_needs_no_most_and_may_end_with_an_answer() -> None:
    messages = [*HELLO, {"role": "assistant", "content": "hi"}]
    raw = json.dumps({"model": "m", "messages": messages}).encode()
    assert [message.text for message in chat_of(parse(raw, PromptBody)).messages] == ["hello", "hi"]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"max_tokens": None}, "max_tokens", "max_tokens must be given"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens: 0 is not allowed"),
        ({"messages": []}, "messages", "messages: [] is not allowed"),
        (
            {"messages": [*HELLO, {"role": "assistant", "content": "so"}]},
            "messages",
            "messages: [{'role': 'user', 'content': 'hello'}, {'role': 'assistant', 'content': "
            "'so'}] is not allowed; the last message must be the user's",
        ),
        (
            {"messages": [{"role": "robot", "content": "a"}]},
            "messages.0.role",
            "messages.0.role: 'robot' is not allowed",
        ),
        (
            {"tools": [{"type": "bash_20250124", "name": "bash"}]},
            "tools.0.type",
            "tools.0.type: 'bash_20250124' is not allowed; describe the tool by name and "
            "input_schema",
        ),
        ({"tools": [{"name": "a"}]}, "tools.0.input_schema", "tools.0.input_schema must be given"),
        ({"tool_choice": {"type": "any"}}, None, "tool_choice requires a call, but tools has no"),
        (
            {"tools": [ADD], "tool_choice": {"type": "tool"}},
            "tool_choice",
            "tool_choice: {'type': 'tool'} is not allowed; name must be given",
        ),
        ({"n": 2}, "n", "n: 2 is not allowed"),
        (
            {"system": [{"type": "image"}]},
            "system.0",
            "system.0: blocks of type 'image' are not supported here",
        ),
    ],
)
def test_what_is_not_served_is_one_line(
    fields: dict[str, Any], param: str | None, says: str
) -> None:
    with pytest.raises(HttpError) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.message.startswith(says)
    assert "\n" not in caught.value.message
