"""Anthropic's client for Python: a forced tool and its result, a stream, a typed answer, a count."""

from __future__ import annotations

import os
from typing import Any

from anthropic import Anthropic, BadRequestError
from common import QUESTION, done

client, model = Anthropic(), os.environ["ANTHROPIC_MODEL"]
schema = {
    "type": "object",
    "properties": {"even": {"enum": ["yes", "no"]}},
    "required": ["even"],
    "additionalProperties": False,
}
tool: Any = {"name": "answer", "description": "answers", "input_schema": schema}
system: Any = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
chat: list[Any] = [{"role": "user", "content": QUESTION}]
asked: dict[str, Any] = {"model": model, "system": system, "tools": [tool], "max_tokens": 120}
count = client.messages.count_tokens(model=model, system=system, tools=[tool], messages=chat)
first = client.messages.create(messages=chat, tool_choice={"type": "any"}, **asked)
assert first.usage.input_tokens + (first.usage.cache_read_input_tokens or 0) == count.input_tokens
(use,) = first.content
assert first.stop_reason == "tool_use"
result = {"type": "tool_result", "tool_use_id": use.id, "content": "noted"}
chat += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
with client.messages.stream(messages=chat, stop_sequences=["\n\n"], **asked) as stream:
    second = stream.get_final_message()
form = {"format": {"type": "json_schema", "schema": schema}}
typed = client.beta.messages.create(
    model=model,
    max_tokens=120,
    messages=[{"role": "user", "content": QUESTION}],
    betas=["context-management-2025-06-27"],
    thinking={"type": "enabled", "budget_tokens": 1024},
    extra_body={"output_config": form, "context_management": {"edits": []}},
)
assert model in [listed.id for listed in client.models.list()]
image: Any = {"type": "base64", "media_type": "image/png", "data": "AA"}
try:
    client.messages.create(
        model=model,
        max_tokens=9,
        messages=[{"role": "user", "content": [{"type": "image", "source": image}]}],
    )
except BadRequestError as error:
    refusal = error.body["error"]["type"]
assert refusal == "invalid_request_error"
done((use.input, second.content[-1].type, typed.content[-1].text))
