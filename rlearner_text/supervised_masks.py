"""Encodes supervised conversations: only assistant turns and their ends are trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlearner_text.incremental_tokenization import Conversation
from rlearner_text.tokenizer import Tokenizer


def check_messages(messages: Any) -> list[dict[str, str]]:
    """Return the messages if they are an optional system message and alternating turns.

    Raises:
        ValueError: if they are not; names the first wrong message.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages is not a list with at least a user and an assistant message")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise ValueError(
                f"message {index} is not an object with exactly the keys role and content"
            )
        if not all(isinstance(value, str) for value in message.values()):
            raise ValueError(f"message {index}: role and content must be texts")
    turns = messages[1:] if messages[0]["role"] == "system" else messages
    for index, message in enumerate(turns):
        expected = ("user", "assistant")[index % 2]
        if message["role"] != expected:
            number = index + len(messages) - len(turns)
            raise ValueError(
                f"message {number} has role {message['role']!r}, expected {expected!r}"
            )
    if not turns or len(turns) % 2:
        raise ValueError("the last message must be the assistant's")
    return messages


def encode_supervised(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]]
) -> tuple[list[int], list[int]]:
    """Return token ids and loss mask, (n,) each, of checked messages, tokenized turn by turn.

    Raises:
        ConfigError: if the chat template rejects the messages.
    """
    system = messages[0]["content"] if messages[0]["role"] == "system" else ""
    conversation = Conversation(tokenizer, system)
    for message in messages[messages[0]["role"] == "system" :]:
        if message["role"] == "user":
            conversation.observe(message["content"])
        else:
            ids = conversation.rules.answer(message["content"])
            conversation.sampled(ids, [0.0] * len(ids), [0, len(ids)])
    return list(conversation.token_ids), list(conversation.loss_mask)
