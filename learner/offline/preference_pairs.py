"""Reads preference data: prompts with a chosen and a rejected answer, which are trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from broker.errors import ConfigError, DataError
from learner.offline.data import SupervisedDialogue, TokenizedExample, join_dialogue, rename_columns
from learner.offline.row_filter import RowFilter
from learner.offline.unusable_rows import EMPTY, LONG, UnusableRows
from rlearner_text.assistant_spans import common_length
from rlearner_text.rows.columns import Row, column_names
from rlearner_text.rows.messages import read_tools
from rlearner_text.rows.reading import read_rows
from rlearner_text.rows.sources import DataSource
from rlearner_text.tokenizer import Tokenizer

EQUAL: Final = "chosen and rejected are the same in the model's chat template"


@dataclass(frozen=True)
class PreferencePair:
    """Two conversations with the same beginning; the mask is 1 from where they differ."""

    chosen: TokenizedExample
    rejected: TokenizedExample


# Returns the tokens of a conversation.
Encode = Callable[[SupervisedDialogue, Tokenizer], TokenizedExample]


def load_pairs(
    source: DataSource | str | Path,
    tokenizer: Tokenizer,
    max_tokens: int,
    key: str = "data",
    *,
    columns: Mapping[str, str] | None = None,
    encode: Encode = SupervisedDialogue.encode,
    row_filter: RowFilter | None = None,
) -> tuple[list[PreferencePair], int]:
    """Return the pairs of a data set, and how many are omitted as longer than ``max_tokens``.

    Rows are ``{"prompt": …, "chosen": …, "rejected": …}``, each a text (one message) or a list of
    messages, perhaps with ``tools``; chosen and rejected may also be whole conversations, or texts
    without ``prompt``, with the same beginning.

    These, and pairs that the chat template rejects, are reported in the log.

    Args:
        columns: our names of columns to those of the data set, where they differ.
        encode: makes the tokens; may raise ConfigError for what the chat template rejects.
        row_filter: what is left out.

    Raises:
        ConfigError: if the data set cannot be read, or there is no chat template.
        DataError: if a row is malformed, its answers are equal, also in tokens, or there is no
            pair to train on.
    """
    pairs: list[PreferencePair] = []
    num_long = 0
    unusable = UnusableRows(str(getattr(source, "path", source)))
    # Without a template no row can be used, which is not the rows' fault.
    tokenizer.chat_template  # noqa: B018
    for line, row in read_rows(source, key):
        unusable.read(line, row)
        try:
            dialogues = read_pair(rename_columns(row, columns or {}))
        except ValueError as error:
            raise DataError(unusable.path, line, str(error)) from None
        if any(dialogue.is_empty for dialogue in dialogues):
            unusable.omit(EMPTY)
            continue
        if row_filter is not None and (reason := row_filter.find_reason(dialogues)):
            unusable.omit(reason)
            continue
        try:
            pair = PreferencePair(*(encode(dialogue, tokenizer) for dialogue in dialogues))
        except ConfigError as error:
            unusable.omit(error.allowed)
            continue
        if pair.chosen.token_ids == pair.rejected.token_ids:
            raise DataError(unusable.path, line, EQUAL)
        if max(len(pair.chosen.token_ids), len(pair.rejected.token_ids)) <= max_tokens:
            pairs.append(pair)
        else:
            num_long += 1
            unusable.omit(f"an answer ends {LONG}")
    unusable.report(f"no row has both answers within {max_tokens} tokens")
    return pairs, num_long


def read_pair(row: Row) -> tuple[SupervisedDialogue, SupervisedDialogue]:
    """Return the chosen and the rejected conversation of a row, trained from where they differ.

    Raises:
        ValueError: if the row is malformed, or they do not differ in an answer.
    """
    if missing := [key for key in ("chosen", "rejected") if key not in row]:
        raise ValueError(f"no column {missing[0]!r}; it has {column_names(row)}")
    if "prompt" not in row and isinstance(row["chosen"], str) and isinstance(row["rejected"], str):
        row = _split_prompt(row["chosen"], row["rejected"])
    tools = read_tools(row.get("tools"))
    chosen = join_dialogue(row.get("prompt"), row["chosen"], "chosen", tools)
    rejected = join_dialogue(row.get("prompt"), row["rejected"], "rejected", tools)
    num_shared = common_length(chosen.messages, rejected.messages)
    if num_shared in (len(chosen.messages), len(rejected.messages)):
        raise ValueError("chosen and rejected are the same, or one is the beginning of the other")
    if (role := chosen.messages[num_shared]["role"]) != "assistant":
        raise ValueError(
            f"chosen and rejected differ at message {num_shared}, of the {role}, not assistant"
        )
    return replace(chosen, num_given=num_shared), replace(rejected, num_given=num_shared)


def _split_prompt(chosen: str, rejected: str) -> Row:
    """Return the common beginning of two texts as their prompt, cut in front of a space."""
    length = common_length(chosen, rejected)
    if length and chosen[length - 1] == " ":
        length -= 1
    if not chosen[:length].strip():
        raise ValueError("without a column 'prompt' chosen and rejected need the same beginning")
    prompt = chosen[:length]
    return {"prompt": prompt, "chosen": chosen[length:], "rejected": rejected[length:]}
