"""OpenAI's client for Python: a chat with a forced tool, then a typed response that goes on from
another, streamed.
"""

from __future__ import annotations

import os
from typing import Any, Literal

from common import QUESTION, done
from openai import OpenAI
from pydantic import BaseModel


class Verdict(BaseModel):
    """What is wanted."""

    even: Literal["yes", "no"]
    sure: bool


client, model = OpenAI(), os.environ["OPENAI_MODEL"]
schema = {
    "type": "object",
    "properties": {"even": {"enum": ["yes", "no"]}},
    "required": ["even"],
    "additionalProperties": False,
}
tool: Any = {
    "type": "function",
    "function": {"name": "answer", "description": "answers", "parameters": schema, "strict": True},
}
chat: list[Any] = [{"role": "user", "content": QUESTION}]
first = client.chat.completions.create(
    model=model, messages=chat, tools=[tool], tool_choice="required"
)
message = first.choices[0].message
(call,) = message.tool_calls
chat += [message, {"role": "tool", "tool_call_id": call.id, "content": "noted"}]
second = client.chat.completions.create(
    model=model, messages=chat, tools=[tool], logprobs=True, max_completion_tokens=8
)
started = client.responses.create(model=model, input=QUESTION, max_output_tokens=16)
typed = client.responses.parse(
    model=model, input="Again.", previous_response_id=started.id, text_format=Verdict
)
with client.responses.stream(model=model, input=QUESTION, text_format=Verdict) as stream:
    final = stream.get_final_response()
parsed = client.chat.completions.parse(
    model=model, messages=[{"role": "user", "content": QUESTION}], response_format=Verdict
)
assert typed.output_parsed is not None
assert parsed.choices[0].message.parsed is not None
done(
    (
        call.function.arguments,
        second.choices[0].message.content,
        typed.output_parsed,
        final.output_text,
    )
)
