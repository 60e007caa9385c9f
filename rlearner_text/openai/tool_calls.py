"""Tool calls in OpenAI's form: offered tools, and calls in the policy's output."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

from broker.errors import ConfigError
from rlearner_text.openai.http_errors import HttpError
from rlearner_text.tokenizer import Tokenizer
from rlearner_text.tool_calls import (
    PROBE,
    ToolCall,
    ToolCallError,
    ToolSyntax,
    UnknownSyntaxError,
    learn_syntax,
)

_QUESTION: Final = {"role": "user", "content": "probe question 21312"}
_ANSWER: Final = "probe answer 31213"
_FUNCTION: Final = {
    "name": "probe",
    "description": "probe",
    "parameters": {"type": "object", "properties": {}},
}
_OFFERED: Final = [{"type": "function", "function": _FUNCTION}]


@lru_cache(maxsize=8)
def tool_syntax(tokenizer: Tokenizer) -> ToolSyntax:
    """Return how the model's chat template writes calls.

    Raises:
        HttpError: 400 if it does not write them as JSON.
    """
    try:
        chat = [_QUESTION, {"role": "assistant", "content": _ANSWER}]
        words = tokenizer.render_chat(chat, add_generation_prompt=False, tools=_OFFERED)
        call_text = tokenizer.render_chat(
            [_QUESTION, PROBE], add_generation_prompt=False, tools=_OFFERED
        )
        syntax = learn_syntax(call_text, words[: words.index(_ANSWER)])[0]
        return replace(syntax, after=syntax.after[: _turn_end(syntax.after, tokenizer)])
    except (UnknownSyntaxError, ConfigError, ValueError) as error:
        problem = error.allowed if isinstance(error, ConfigError) else str(error)
        raise HttpError(
            400, f"the model's chat template cannot be used with tools: {problem}", param="tools"
        ) from None


def _turn_end(text: str, tokenizer: Tokenizer) -> int:
    """Return where the turn ends in the text that a template puts after a call."""
    ends = [
        tokenizer.decode([token_id], skip_special_tokens=False)
        for token_id in tokenizer.eos_token_ids
    ]
    return min(
        (at for end in ends if end and (at := text.find(end)) >= 0), default=len(text.rstrip())
    )


def text_with_markers(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """Return the text of an answer with special tokens, which may be markers of calls."""
    ids = list(token_ids)
    while ids and ids[-1] in tokenizer.eos_token_ids:
        del ids[-1]
    return tokenizer.decode(ids, skip_special_tokens=False)


def split_calls(
    text: str, syntax: ToolSyntax, prefix: str, most: int | None = None
) -> tuple[str, list[dict[str, Any]]]:
    """Split a text at its first call into words and at most ``most`` calls; none if one is bad."""
    try:
        calls = syntax.calls(text)[:most]
    except ToolCallError:
        return text, []
    words = text.partition(syntax.opener)[0] if syntax.opener else ""
    calls_made = [
        _to_openai_call(call, f"{prefix}{number:02d}") for number, call in enumerate(calls)
    ]
    return words.rstrip() if calls else text, calls_made


def prefix_of(reply_id: str, index: int) -> str:
    """Return the prefix of one choice's call ids, which a client sends back with results."""
    return f"call_{reply_id}{index:03d}"


def _to_openai_call(call: ToolCall, identifier: str) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(call.arguments)}
    return {"id": identifier, "type": "function", "function": function}
