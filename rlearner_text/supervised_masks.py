"""Encodes supervised conversations: only assistant turns and their ends are trained."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, takewhile
from typing import Any

from rlearner_text.incremental_tokenization import Conversation
from rlearner_text.rows.messages import Message, is_trained
from rlearner_text.template_rules import Examples
from rlearner_text.tokenizer import Tokenizer


def encode_supervised(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: str = "", num_given: int = 0
) -> tuple[list[int], list[int]]:
    """Return token ids and loss mask, (n,) each, of checked messages, tokenized turn by turn.

    Answers of weight 0 before all others are encoded as a domain's examples are.

    Args:
        tools: that the assistant may call, as JSON.
        num_given: messages at the beginning that are not trained.

    Raises:
        ConfigError: if the chat template rejects the messages.
    """
    has_system = messages[0]["role"] == "system"
    system = messages[0]["content"] if has_system else ""
    turns = messages[has_system:]
    examples = _leading_examples(turns)
    num_before = int(has_system) + 2 * len(examples)
    conversation = Conversation(tokenizer, system, tools, examples)
    for role, group in groupby(messages[num_before:], key=_read_role):
        if role == "tool":
            conversation.observe(tuple(turn["content"] for turn in group), "tool")
            continue
        for turn in group:
            if role == "user":
                conversation.observe(turn["content"])
            else:
                ids = conversation.rules.answer(turn["content"], turn.get("tool_calls", ()))
                conversation.sampled(ids, [0.0] * len(ids), [0, len(ids)])
    mask = list(conversation.loss_mask)
    answers = [
        index >= num_given and is_trained(message)
        for index, message in enumerate(messages)
        if index >= num_before and message["role"] == "assistant"
    ]
    for (start, end), has_loss in zip(conversation.spans, answers, strict=True):
        if not has_loss:
            mask[start:end] = [0] * (end - start)
    return list(conversation.token_ids), mask


def _read_role(message: Message) -> Any:
    return message["role"]


def _leading_examples(turns: Sequence[Message]) -> Examples:
    """Return question and answer of the turns before the first trained one; not of the last."""
    pairs = zip(turns[:-2:2], turns[1:-2:2], strict=False)
    examples = takewhile(lambda pair: pair[0]["role"] == "user" and _is_example(pair[1]), pairs)
    return tuple((question["content"], answer["content"]) for question, answer in examples)


def _is_example(message: Message) -> bool:
    return message.get("weight") == 0 and not message.get("tool_calls")
