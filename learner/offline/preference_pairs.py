"""Reads preference data: prompts with a chosen and a rejected answer, which are trained."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from broker.errors import ConfigError, DataError
from learner.offline.data import Messages, TokenizedExample, join_conversation
from learner.offline.unusable_rows import UnusableRows
from rlearner_text.data_rows import Row, read_rows
from rlearner_text.supervised_masks import encode_supervised, is_trained
from rlearner_text.tokenizer import Tokenizer


@dataclass(frozen=True)
class PreferencePair:
    """Two conversations with the same beginning; the mask is 1 from where they differ."""

    chosen: TokenizedExample
    rejected: TokenizedExample


def load_pairs(
    path: str | Path, tokenizer: Tokenizer, max_tokens: int, key: str = "data"
) -> tuple[list[PreferencePair], int]:
    """Return the pairs of a file, and how many are omitted as longer than ``max_tokens``.

    Rows are ``{"prompt": …, "chosen": …, "rejected": …}``, each a text (one message) or a list of
    messages; chosen and rejected may also be whole conversations with the same beginning.

    These, and pairs that the chat template rejects, are reported in the log.

    Raises:
        ConfigError: if the file cannot be read, or there is no chat template.
        DataError: if a row is malformed, or the file has no pair to train on.
    """
    pairs: list[PreferencePair] = []
    num_long = 0
    unusable = UnusableRows(path)
    # Without a template no row can be used, which is not the rows' fault.
    tokenizer.chat_template  # noqa: B018
    for line, row in read_rows(path, key):
        unusable.read(line)
        try:
            chosen_messages, rejected_messages, num_shared = _read_conversations(row)
        except ValueError as error:
            raise DataError(str(path), line, str(error)) from None
        try:
            examples = [
                _encode_example(tokenizer, messages, num_shared)
                for messages in (chosen_messages, rejected_messages)
            ]
        except ConfigError as error:
            unusable.omit(error.allowed)
            continue
        if all(len(example.token_ids) <= max_tokens for example in examples):
            pairs.append(PreferencePair(*examples))
        else:
            num_long += 1
            unusable.omit("an answer ends beyond data.max_tokens, or the model's limit")
    unusable.report(f"no row has both answers within {max_tokens} tokens")
    return pairs, num_long


def _read_conversations(row: Row) -> tuple[Messages, Messages, int]:
    """Return both conversations, and the number of messages that they share at the beginning."""
    if missing := [key for key in ("chosen", "rejected") if key not in row]:
        raise ValueError(f"the row has no key {missing[0]!r}; known: prompt, chosen, rejected")
    chosen_messages, rejected_messages = (
        join_conversation(row.get("prompt"), row[key], key) for key in ("chosen", "rejected")
    )
    num_shared = 0
    while (
        num_shared < min(len(chosen_messages), len(rejected_messages))
        and chosen_messages[num_shared] == rejected_messages[num_shared]
    ):
        num_shared += 1
    if num_shared in (len(chosen_messages), len(rejected_messages)):
        raise ValueError("chosen and rejected are the same, or one is the beginning of the other")
    if (role := chosen_messages[num_shared]["role"]) != "assistant":
        raise ValueError(
            f"chosen and rejected differ at message {num_shared}, of the {role}, not assistant"
        )
    return chosen_messages, rejected_messages, num_shared


def _encode_example(tokenizer: Tokenizer, messages: Messages, num_shared: int) -> TokenizedExample:
    """Return the conversation, with the assistant's turns in the first ``shared`` masked."""
    token_ids, mask = encode_supervised(tokenizer, messages)
    turns = sum(map(is_trained, messages[:num_shared]))
    for index, value in enumerate(mask):
        if turns == 0 and value:
            break
        # A turn ends where the next token is not trained.
        turns -= value and mask[index + 1 : index + 2] != [1]
        mask[index] = 0
    return TokenizedExample(token_ids, mask)
