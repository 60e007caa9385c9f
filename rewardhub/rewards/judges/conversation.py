"""Writes the messages of an episode as one text, for a judge."""

from __future__ import annotations

import json
from typing import Any

from rewardhub.rewards.base import Sample

INDENT = "    "


def conversation_text(sample: Sample) -> str:
    """Return all messages, each below its role; a record without messages gives prompt and answer.

    Texts are indented, so that none can pass for the message of another role.
    """
    messages = sample.messages or [
        {"role": "user", "content": sample.prompt},
        {"role": "assistant", "content": sample.response},
    ]
    return "\n\n".join(f"[{message['role']}]\n{_indented_text(message)}" for message in messages)


def _indented_text(message: dict[str, Any]) -> str:
    content: str = message["content"]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    # the policy's text usually holds its calls
    lines = [
        f"{call['name']}({json.dumps(call['arguments'], ensure_ascii=False)})"
        for call in calls
        if call["name"] not in content
    ]
    return "\n".join(INDENT + line for line in [*content.splitlines(), *lines])
