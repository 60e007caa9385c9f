"""Conversations for supervised fine-tuning: a JSONL file in, tokens, masks and batches out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from broker.errors import ConfigError, DataError
from text.masks import check_messages, encode_supervised
from text.tokenizer import Tokenizer

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Example:
    """One conversation: token ids and loss mask, n values each."""

    token_ids: list[int]
    loss_mask: list[int]

    @property
    def num_trained(self) -> int:
        """Tokens that carry loss; the first token of a sequence is never predicted."""
        return sum(self.loss_mask[1:])


def read_conversations(path: str | Path) -> Iterator[tuple[int, Messages]]:
    """(line number, messages) of every row ``{"messages": [{"role": …, "content": …}, …]}``; empty lines are skipped.

    Raises:
        ConfigError: no such file.
        DataError: a malformed row; names file and line.
    """
    number = 0
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, _messages(str(path), number, line)
    except OSError as error:
        raise ConfigError("data", str(path), f"the file cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(str(path), number + 1, f"not UTF-8: {error.reason}") from None


def _messages(path: str, number: int, line: str) -> Messages:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(path, number, f"not JSON: {error}") from None
    if not isinstance(row, dict) or "messages" not in row:
        raise DataError(path, number, "the row is no object with the key 'messages'")
    try:
        return check_messages(row["messages"])
    except ValueError as error:
        raise DataError(path, number, str(error)) from None


def load_examples(path: str | Path, tokenizer: Tokenizer, max_tokens: int) -> list[Example]:
    """Every conversation of the file as tokens, cut to ``max_tokens``; those with nothing left to train are dropped.

    Raises:
        ConfigError: no such file, or the chat template refuses the messages.
        DataError: a malformed row, or a file without any row to train on.
    """
    examples: list[Example] = []
    last_line = 0
    for last_line, messages in read_conversations(path):  # noqa: B007 - used below, for a file without any
        token_ids, mask = encode_supervised(tokenizer, messages)
        example = Example(token_ids[:max_tokens], mask[:max_tokens])
        if example.num_trained:
            examples.append(example)
    if not examples:
        raise DataError(str(path), last_line, f"no row has an assistant's answer within {max_tokens} tokens")
    return examples


def shuffled_batches(num_examples: int, batch_size: int, seed: int) -> Iterator[list[int]]:
    """Indices of one batch after another for ever: every example once an epoch, in an order of its own each epoch."""
    random = np.random.default_rng(seed)
    waiting: list[int] = []
    while True:
        while len(waiting) < batch_size:
            waiting += random.permutation(num_examples).tolist()
        yield waiting[:batch_size]
        waiting = waiting[batch_size:]


def micro_batches(examples: Sequence[Example], max_padded_tokens: int) -> list[list[Example]]:
    """Cut a batch into parts of at most that many padded tokens (at least one example each), similar lengths together."""
    parts: list[list[Example]] = []
    for example in sorted(examples, key=lambda e: len(e.token_ids), reverse=True):
        # The first of a part is its longest, so it sets the width.
        if not parts or (len(parts[-1]) + 1) * len(parts[-1][0].token_ids) > max_padded_tokens:
            parts.append([])
        parts[-1].append(example)
    return parts
