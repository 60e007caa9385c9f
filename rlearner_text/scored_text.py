"""Encodes whole conversations for models that score them, the same in training and in reward hubs.

Texts are shielded: what spells a special token in them is read as text, so no answer can end its
turn and begin another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from broker.errors import ConfigError
from rlearner_text.special_text import shield_values
from rlearner_text.tokenizer import Tokenizer

# Of a message, as a chat template reads them; a weight is for training alone.
_FIELDS: Final = ("role", "content", "tool_calls", "name", "tool_call_id")


def encode_scored(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], tools: str = ""
) -> list[int]:
    """Return the token ids of a conversation without a prompt for another answer.

    Args:
        tools: that the assistant may call, as JSON; empty if there are none.

    Raises:
        ConfigError: if the chat template is missing, or rejects the messages.
    """
    rendered = tokenizer.render_chat(
        [shield_message(tokenizer, message) for message in messages],
        add_generation_prompt=False,
        tools=json.loads(tools or "[]"),
    )
    return tokenizer.encode(rendered)


def shield_message(tokenizer: Tokenizer, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message for a chat template, with every text in it shielded."""
    shielded = {name: message[name] for name in _FIELDS if message.get(name) is not None}
    for name in ("content", "tool_calls"):
        if name in shielded:
            shielded[name] = shield_values(tokenizer.shield, shielded[name])
    return shielded


def has_chat_template(tokenizer: Tokenizer) -> bool:
    """Return whether a model has a chat template."""
    try:
        return tokenizer.chat_template is not None
    except ConfigError:
        return False
