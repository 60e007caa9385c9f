"""Encodes supervised conversations: only assistant turns and their ends are trained."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rlearner_text.incremental_tokenization import Conversation
from rlearner_text.rows.messages import Message
from rlearner_text.tokenizer import Tokenizer


def encode_supervised(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: str = "", num_given: int = 0
) -> tuple[list[int], list[int]]:
    """Return token ids and loss mask, (n,) each, of checked messages, tokenized turn by turn.

    Args:
        tools: that the assistant may call, as JSON.
        num_given: messages at the beginning that are not trained.

    Raises:
        ConfigError: if the chat template rejects the messages.
    """
    has_system = messages[0]["role"] == "system"
    system = messages[0]["content"] if has_system else ""
    conversation = Conversation(tokenizer, system, tools)
    for role, turns in groupby(messages[has_system:], key=_read_role):
        if role == "tool":
            conversation.observe(tuple(turn["content"] for turn in turns), "tool")
            continue
        for turn in turns:
            if role == "user":
                conversation.observe(turn["content"])
            else:
                ids = conversation.rules.answer(turn["content"], turn.get("tool_calls", ()))
                conversation.sampled(ids, [0.0] * len(ids), [0, len(ids)])
    mask = list(conversation.loss_mask)
    num_untrained = sum(message["role"] == "assistant" for message in messages[:num_given])
    for start, end in conversation.spans[:num_untrained]:
        mask[start:end] = [0] * (end - start)
    return list(conversation.token_ids), mask


def _read_role(message: Message) -> Any:
    return message["role"]
