"""Reads conversations for offline training, and makes tokens, masks and batches of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from broker.errors import ConfigError, DataError
from learner.algorithm.samples import TrainSample
from learner.offline.unusable_rows import UnusableRows
from rlearner_text.data_rows import Row, read_rows
from rlearner_text.supervised_masks import check_messages, encode_supervised
from rlearner_text.tokenizer import Tokenizer

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class TokenizedExample:
    """One conversation: token ids and loss mask, n values each."""

    token_ids: list[int]
    loss_mask: list[int]

    @property
    def num_trained(self) -> int:
        """Number of tokens with loss; the first token of a sequence is never predicted."""
        return sum(self.loss_mask[1:])

    def sample(self) -> TrainSample:
        """Return the training sample: every trained token has weight 1 instead of an advantage."""
        ids = np.array(self.token_ids, np.int32)
        mask = np.array(self.loss_mask, np.uint8)
        mask[:1] = 0
        zeros = np.zeros(len(ids), np.float32)
        versions = np.full(len(ids), -1, np.int32)
        return TrainSample(
            ids,
            mask,
            zeros,
            versions=versions,
            advantages=mask.astype(np.float32),
            group=0,
            reward=0.0,
        )


def read_conversations(path: str | Path, key: str = "data") -> Iterator[tuple[int, Messages]]:
    """Yield (line, messages) of every row.

    Rows are ``{"messages": [...]}``, or ``{"prompt": …, "response": …}``, each a text or a list of
    messages.

    Raises:
        ConfigError: if the file cannot be read.
        DataError: if a row is malformed; names file and line.
    """
    for number, row in read_rows(path, key):
        try:
            yield number, _read_messages(row)
        except ValueError as error:
            raise DataError(str(path), number, str(error)) from None


def _read_messages(row: Row) -> Messages:
    if "messages" in row:
        return check_messages(row["messages"])
    if "prompt" in row and "response" in row:
        return join_conversation(row["prompt"], row["response"], "response")
    raise ValueError("expected an object with the key 'messages', or with 'prompt' and 'response'")


def join_conversation(prompt: Any, answer: Any, key: str) -> Messages:
    """Return the messages of a prompt and its answer.

    A text is one message. A list of messages as the answer continues the prompt; one that begins
    with the user or the system is the whole conversation, and the prompt is ignored.

    Args:
        key: of the answer, for error messages.

    Raises:
        ValueError: if they are neither texts nor such lists, or the conversation does not end with
            the assistant.
    """
    if isinstance(answer, str):
        answer = [{"role": "assistant", "content": answer}]
    if not isinstance(answer, list) or not all(isinstance(message, dict) for message in answer):
        raise ValueError(f"{key} is neither a text nor a list of messages")
    if answer and answer[0].get("role") != "assistant":
        prompt = []
    elif isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    elif not isinstance(prompt, list):
        raise ValueError("prompt is neither a text nor a list of messages")
    try:
        return check_messages([*prompt, *answer])
    except ValueError as error:
        raise ValueError(f"prompt and {key}: {error}") from None


def load_examples(
    path: str | Path, tokenizer: Tokenizer, max_tokens: int, key: str = "data"
) -> list[TokenizedExample]:
    """Return the conversations of a file as tokens, cut to ``max_tokens``, if any is trained.

    Rows that are cut or left out are reported in the log.

    Raises:
        ConfigError: if the file cannot be read, or there is no chat template.
        DataError: if a row is malformed, or the file has no row to train on.
    """
    examples: list[TokenizedExample] = []
    unusable = UnusableRows(path)
    # Without a template no row can be used, which is not the rows' fault.
    tokenizer.chat_template  # noqa: B018
    for line, messages in read_conversations(path, key):
        unusable.read(line)
        try:
            token_ids, mask = encode_supervised(tokenizer, messages)
        except ConfigError as error:
            unusable.omit(error.allowed)
            continue
        example = TokenizedExample(token_ids[:max_tokens], mask[:max_tokens])
        if not example.num_trained:
            unusable.omit("the first answer begins beyond data.max_tokens, or the model's limit")
            continue
        if len(token_ids) > max_tokens:
            unusable.shorten(f"longer than {max_tokens} tokens")
        examples.append(example)
    unusable.report(f"no row has an assistant's answer within {max_tokens} tokens")
    return examples


def shuffled_batches(num_examples: int, batch_size: int, seed: int) -> Iterator[list[int]]:
    """Yield batches of indices without end: each example once per epoch, in a new order."""
    rng = np.random.default_rng(seed)
    waiting: list[int] = []
    while True:
        while len(waiting) < batch_size:
            waiting += rng.permutation(num_examples).tolist()
        yield waiting[:batch_size]
        waiting = waiting[batch_size:]
