"""Encodes supervised conversations: only assistant turns and their ends are trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from rlearner_text.incremental_tokenization import Conversation
from rlearner_text.template_rules import Examples
from rlearner_text.tokenizer import Tokenizer


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Return the messages if they are an optional system message and alternating turns.

    An assistant message with ``"weight": 0``, as in OpenAI's files, is not trained on.

    Raises:
        ValueError: if they are not; names the first wrong message.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages is not a list with at least a user and an assistant message")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or set(message) - {"weight"} != {"role", "content"}:
            raise ValueError(
                f"message {index} is not an object with exactly the keys role and content, and "
                "perhaps weight"
            )
        if not isinstance(message["role"], str) or not isinstance(message["content"], str):
            raise ValueError(f"message {index}: role and content must be texts")
        weight = message.get("weight")
        if weight not in (None, 0, 1) or (weight is not None and message["role"] != "assistant"):
            raise ValueError(f"message {index}: weight is 0 or 1, of an assistant's message")
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
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]
) -> tuple[list[int], list[int]]:
    """Return token ids and loss mask, (n,) each, of checked messages, tokenized turn by turn.

    Answers of weight 0 before all others are encoded as a domain's examples are.

    Raises:
        ConfigError: if the chat template rejects the messages.
    """
    has_system = messages[0]["role"] == "system"
    system = messages[0]["content"] if has_system else ""
    turns = messages[has_system:]
    examples = _leading_examples(turns)
    conversation = Conversation(tokenizer, system, examples=examples)
    for message in turns[2 * len(examples) :]:
        if message["role"] == "user":
            conversation.observe(message["content"])
            continue
        ids = conversation.rules.answer(message["content"])
        conversation.sampled(ids, [0.0] * len(ids), [0, len(ids)])
        if not is_trained(message):
            conversation.loss_mask[-len(ids) :] = bytes(len(ids))
    return list(conversation.token_ids), list(conversation.loss_mask)


def is_trained(message: Mapping[str, Any]) -> bool:
    """Return whether a checked message is an answer to train on."""
    return message["role"] == "assistant" and message.get("weight") != 0


def _leading_examples(turns: Sequence[Mapping[str, Any]]) -> Examples:
    """Return question and answer of the turns before the first trained one; not of the last."""
    pairs = zip(turns[:-2:2], turns[1:-2:2], strict=True)
    untrained = takewhile(lambda pair: not is_trained(pair[1]), pairs)
    return tuple((question["content"], answer["content"]) for question, answer in untrained)
