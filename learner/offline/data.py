"""Reads conversations for offline training, and makes tokens, masks and batches of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from broker.errors import ConfigError, DataError
from learner.algorithm.samples import TrainSample
from learner.offline.row_filter import RowFilter
from learner.offline.unusable_rows import EMPTY, LONG, UnusableRows
from rlearner_text.rows.columns import Row, column_names, column_value
from rlearner_text.rows.messages import (
    Message,
    check_messages,
    is_trained,
    read_messages,
    read_tools,
)
from rlearner_text.rows.reading import read_rows
from rlearner_text.rows.sources import DataSource
from rlearner_text.supervised_masks import encode_supervised
from rlearner_text.tokenizer import Tokenizer

Messages = list[Message]


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


@dataclass(frozen=True)
class SupervisedDialogue:
    """A conversation of a row.

    Attributes:
        messages: checked; the last one is the assistant's.
        num_given: messages at the beginning, the prompt, that are not trained.
        tools: that the assistant may call, as JSON; empty if there are none.
    """

    messages: Messages
    num_given: int = 0
    tools: str = ""

    @property
    def is_empty(self) -> bool:
        """Whether the assistant says nothing in what is trained."""
        return not any(
            message["content"].strip() or message.get("tool_calls")
            for message in self.messages[self.num_given :]
            if is_trained(message)
        )

    def encode(self, tokenizer: Tokenizer) -> TokenizedExample:
        """Return its tokens.

        Raises:
            ConfigError: if the chat template rejects the messages.
        """
        return TokenizedExample(
            *encode_supervised(tokenizer, self.messages, self.tools, self.num_given)
        )


def rename_columns(row: Row, columns: Mapping[str, str]) -> Row:
    """Return the row with more columns: ``columns`` are names here and those of the data set.

    Raises:
        ValueError: if the row lacks one of them.
    """
    renamed = {name: column_value(row, column) for name, column in columns.items()}
    for name, value in renamed.items():
        if value is None:
            raise ValueError(f"no column {columns[name]!r}; it has {column_names(row)}")
    return row | renamed


def read_dialogue(row: Row) -> SupervisedDialogue:
    """Return the conversation of a row.

    Rows are ``{"messages": […]}``, or ``{"prompt": …, "completion": …}``, each a text or a list
    of messages, perhaps with ``tools``. ``conversations`` and ``response`` are other names of
    ``messages`` and ``completion``.

    Raises:
        ValueError: if the row is malformed.
    """
    tools = read_tools(row.get("tools"))
    for key in ("messages", "conversations"):
        if key in row:
            return SupervisedDialogue(check_messages(row[key]), tools=tools)
    for key in ("completion", "response"):
        if "prompt" in row and key in row:
            return join_dialogue(row["prompt"], row[key], key, tools)
    expected = "messages, or prompt and completion (or response)"
    raise ValueError(f"expected the columns {expected}; it has {column_names(row)}")


def join_dialogue(prompt: Any, answer: Any, key: str, tools: str = "") -> SupervisedDialogue:
    """Return the conversation of a prompt and its answer, which is trained.

    A text is one message. A list of messages as the answer continues the prompt; one that begins
    with the user or the system is the whole conversation, and the prompt is ignored.

    Args:
        key: of the answer, for error messages.

    Raises:
        ValueError: if they are neither texts nor such lists, or the conversation does not end with
            the assistant.
    """
    answers = read_messages(answer, key, "assistant")
    prompts: Messages = []
    if answers[0]["role"] in ("assistant", "tool"):
        prompts = read_messages(prompt, "prompt", "user")
    try:
        return SupervisedDialogue(check_messages([*prompts, *answers]), len(prompts), tools)
    except ValueError as error:
        raise ValueError(f"prompt and {key}: {error}") from None


def load_examples(
    source: DataSource | str | Path,
    tokenizer: Tokenizer,
    max_tokens: int,
    key: str = "data",
    *,
    columns: Mapping[str, str] | None = None,
    row_filter: RowFilter | None = None,
) -> list[TokenizedExample]:
    """Return the conversations of a data set as tokens, cut to ``max_tokens``, if any is trained.

    Rows that are cut or left out are reported in the log.

    Args:
        columns: our names of columns to those of the data set, where they differ.
        row_filter: what is left out.

    Raises:
        ConfigError: if the data set cannot be read, or there is no chat template.
        DataError: if a row is malformed, or there is no row to train on.
    """
    examples: list[TokenizedExample] = []
    unusable = UnusableRows(str(getattr(source, "path", source)))
    # Without a template no row can be used, which is not the rows' fault.
    tokenizer.chat_template  # noqa: B018
    for line, row in read_rows(source, key):
        unusable.read(line, row)
        try:
            dialogue = read_dialogue(rename_columns(row, columns or {}))
        except ValueError as error:
            raise DataError(unusable.path, line, str(error)) from None
        if dialogue.is_empty:
            unusable.omit(EMPTY)
            continue
        if row_filter is not None and (reason := row_filter.find_reason((dialogue,))):
            unusable.omit(reason)
            continue
        try:
            whole = dialogue.encode(tokenizer)
        except ConfigError as error:
            unusable.omit(error.allowed)
            continue
        example = TokenizedExample(whole.token_ids[:max_tokens], whole.loss_mask[:max_tokens])
        if not example.num_trained:
            unusable.omit(f"the first answer begins {LONG}")
            continue
        if len(whole.token_ids) > max_tokens:
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
