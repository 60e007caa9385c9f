"""Content blocks of Anthropic's protocol become the messages of a chat. No network."""

from __future__ import annotations

from typing import Any

import pytest

from rlearner_text.anthropic.content_blocks import (
    AssistantMessage,
    InputMessage,
    chat_messages,
    system_text,
)
from rlearner_text.openai.http_errors import HttpError
from rlearner_text.openai.request_bodies import ChatMessage

CACHED = {"cache_control": {"type": "ephemeral"}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}


def convert(*messages: dict[str, Any]) -> list[ChatMessage]:
    return chat_messages([InputMessage.model_validate(message) for message in messages])


def test_turns_with_tools_and_reasoning() -> None:
    chat = convert(
        {"role": "user", "content": [{"type": "text", "text": "list", **CACHED}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "which?", "signature": "s1"},
                {"type": "redacted_thinking", "data": "xx"},
                {"type": "text", "text": "I list.", "citations": None},
                {"type": "tool_use", "id": "t1", "name": "ls", "input": {"path": "a", "n": 1}},
                {"type": "tool_use", "id": "t2", "name": "ls", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "b c", **CACHED},
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "is_error": True,
                    "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "such"}],
                },
                {"type": "text", "text": "hurry"},
                {"type": "text", "text": "up"},
            ],
        },
    )
    calls = [
        {"id": "t1", "type": "function", "function": {"name": "ls", "arguments": arguments}}
        for arguments in ({"path": "a", "n": 1},)
    ]
    calls.append({"id": "t2", "type": "function", "function": {"name": "ls", "arguments": {}}})
    assert [message.plain() for message in chat] == [
        {"role": "user", "content": "list"},
        {
            "role": "assistant",
            "content": "<think>\nwhich?\n</think>\n\nI list.",
            "tool_calls": calls,
        },
        {"role": "tool", "content": "b c", "tool_call_id": "t1"},
        {"role": "tool", "content": "no\nsuch", "tool_call_id": "t2"},
        {"role": "user", "content": "hurry\nup"},
    ]
    answer = chat[1]
    assert isinstance(answer, AssistantMessage)
    assert (answer.text, answer.signature) == ("I list.", "s1")
    assert answer.spoken()["content"] == "I list."
    # "which?" and "I list." and {"path": "a", "n": 1} and {}
    assert answer.characters == 6 + 7 + 21 + 2


def test_results_without_content_and_strings() -> None:
    chat = convert(
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": None}]},
        {"role": "system", "content": "d"},
    )
    assert [(message.role, message.text) for message in chat] == [
        ("user", "a\nb"),
        ("assistant", "c"),
        ("tool", ""),
        ("system", "d"),
    ]


def test_late_system_messages_are_the_users_where_a_template_refuses_them() -> None:
    messages = [
        InputMessage(role=role, content=text)
        for role, text in (("system", "a"), ("user", "b"), ("system", "c"), ("assistant", "d"))
    ]
    kept = chat_messages(messages)
    assert [message.role for message in kept] == ["system", "user", "system", "assistant"]
    said = [(message.role, message.text) for message in chat_messages(messages, late_system=False)]
    assert said == [("system", "a"), ("user", "b\nc"), ("assistant", "d")]


def test_tools_that_a_search_has_found_are_described_in_its_result() -> None:
    references = [{"type": "tool_reference", "tool_name": name} for name in ("fetch", "gone")]
    result = {"type": "tool_result", "tool_use_id": "t", "content": references}
    message = InputMessage(role="user", content=[result])
    (chat,) = chat_messages([message], {"fetch": {"name": "fetch", "parameters": {}}})
    assert chat.text == (
        '<function>{"name": "fetch", "parameters": {}}</function>\n'
        '<function>{"name": "gone"}</function>'
    )


def test_a_system_prompt_is_a_text_or_blocks() -> None:
    assert system_text("be brief") == "be brief"
    note = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=0af3;"}
    blocks = [note, {"type": "text", "text": "be"}, {"type": "text", "text": "brief", **CACHED}]
    assert system_text(blocks) == "be\nbrief"
    assert system_text([]) == ""


@pytest.mark.parametrize(
    ("message", "param", "says"),
    [
        (
            {"role": "user", "content": [IMAGE]},
            "messages.0.content.0",
            "messages.0.content.0: blocks of type 'image' are not supported here; the model reads "
            "text only",
        ),
        (
            {"role": "user", "content": [{"type": "document", "source": {}}]},
            "messages.0.content.0",
            "messages.0.content.0: blocks of type 'document' are not supported",
        ),
        (
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]}],
            },
            "messages.0.content.0.content.0",
            "messages.0.content.0.content.0: blocks of type 'image'",
        ),
        (
            {"role": "assistant", "content": [{"type": "server_tool_use"}]},
            "messages.0.content.0",
            "messages.0.content.0: blocks of type 'server_tool_use'",
        ),
        (
            {"role": "user", "content": [{"text": "a"}]},
            "messages.0.content.0.type",
            "messages.0.content.0.type must be given",
        ),
        (
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "ls"}]},
            "messages.0.content.0.input",
            "messages.0.content.0.input must be given",
        ),
        (
            {"role": "user", "content": []},
            "messages.0.content",
            "messages.0.content: [] is not allowed; at least one block",
        ),
    ],
)
def test_blocks_that_are_not_served(message: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(HttpError) as caught:
        convert(message)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.message.startswith(says)
    assert "\n" not in caught.value.message
