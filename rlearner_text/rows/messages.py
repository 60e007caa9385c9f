"""Reads message lists in the forms that TRL, verl and OpenAI's API have."""

from __future__ import annotations

import json
from typing import Any, Final

from broker.contract import strict

Message = dict[str, Any]

# Of ShareGPT's {"from": …, "value": …}.
_ROLES: Final = {"human": "user", "gpt": "assistant"}
_KEYS: Final = ("role", "content", "tool_calls", "name", "tool_call_id", "weight")


def read_messages(value: Any, column: str, role: str) -> list[Message]:
    """Return the messages of a column: a list of them, or one text of this role.

    Raises:
        ValueError: if it is neither; names the first wrong message.
    """
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{column} is neither a text nor a list of messages")
    return [_read_message(message, index) for index, message in enumerate(value)]


def read_tools(value: Any) -> str:
    """Return the tools of a row as JSON, empty if it has none.

    Args:
        value: a list of schemas in OpenAI's form, each or all of them perhaps as JSON; or None.

    Raises:
        ValueError: if it is something else.
    """
    value = _parse_text(value) if isinstance(value, str) and value else value
    if not value:
        return ""
    tools = [_parse_text(tool) for tool in value] if isinstance(value, list) else [value]
    if not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("tools is not a list of schemas in OpenAI's form")
    wrapped = [
        tool if "function" in tool else {"type": "function", "function": tool} for tool in tools
    ]
    return json.dumps(wrapped)


def check_messages(value: Any, last_role: str = "assistant") -> list[Message]:
    """Return the messages if they are an optional system message and alternating turns.

    An assistant message with ``"weight": 0``, as in OpenAI's files, is not trained on.

    Raises:
        ValueError: if they are not a list of such messages, or end with another role than the last
            one allowed; names the first wrong message.
    """
    if not isinstance(value, list) or not value:
        raise ValueError("messages is not a list of messages")
    messages = read_messages(value, "messages", "user")
    previous: Message = {}
    for index, message in enumerate(messages):
        if index == 0 and message["role"] == "system":
            continue
        allowed = _following_roles(previous)
        if message["role"] not in allowed:
            expected = " or ".join(map(repr, allowed))
            raise ValueError(f"message {index} has role {message['role']!r}, expected {expected}")
        previous = message
    if previous.get("role") != last_role:
        raise ValueError(f"the last message must be the {last_role}'s")
    return messages


def is_trained(message: Message) -> bool:
    """Return whether a checked message is an answer to train on."""
    return message["role"] == "assistant" and message.get("weight") != 0


def _following_roles(previous: Message) -> tuple[str, ...]:
    if (role := previous.get("role")) == "user":
        return ("assistant",)
    if role == "tool":
        return ("assistant", "tool")
    return ("tool",) if previous.get("tool_calls") else ("user",)


def _read_message(message: Any, index: int) -> Message:
    if isinstance(message, dict) and "from" in message and "value" in message:
        sender = message["from"]
        message = {"role": _ROLES.get(sender, sender), "content": message["value"]}
    if isinstance(message, dict) and message.get("tool_calls"):
        calls = [_read_call(call, index) for call in message["tool_calls"]]
        message = {"content": ""} | message | {"tool_calls": calls}
    if not isinstance(message, dict) or not {"role", "content"} <= set(message):
        raise ValueError(f"message {index} is not an object with the keys role and content")
    if unknown := sorted(set(message) - set(_KEYS)):
        raise ValueError(f"message {index} has the key {unknown[0]!r}; known: {', '.join(_KEYS)}")
    content = message["content"]
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not isinstance(message["role"], str) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"message {index}: role and content must be texts")
    weight = message.get("weight")
    if weight not in (None, 0, 1) or (weight is not None and message["role"] != "assistant"):
        raise ValueError(f"message {index}: weight is 0 or 1, of an assistant's message")
    checked: Message = {"role": message["role"], "content": "".join(map(str, texts))}
    if message.get("tool_calls"):
        checked["tool_calls"] = message["tool_calls"]
    return checked if weight is None else checked | {"weight": weight}


def _read_call(call: Any, index: int) -> dict[str, Any]:
    """Return a tool call in OpenAI's form, its arguments as an object."""
    function = call.get("function", call) if isinstance(call, dict) else {}
    name = function.get("name")
    arguments = _parse_text(function.get("arguments", {}))
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError(f"message {index}: a tool call has no name, or arguments no object")
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _parse_text(value: Any) -> Any:
    """Return the value of a JSON text, anything else unchanged."""
    try:
        return strict.parse_json(value) if isinstance(value, str) else value
    except strict.BadJson as error:
        raise ValueError(f"not JSON: {error}") from None
