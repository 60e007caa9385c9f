"""Reads question and answer rows from a JSONL or Parquet file; errors name the bad row."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from broker.errors import ConfigError, DataError
from envhub.envs.plain_row import fitting_columns
from rlearner_text import data_rows
from rlearner_text.data_rows import PARQUET


class Row(NamedTuple):
    """A row of a data set of questions.

    Attributes:
        columns: all of its columns that a sample's row can have, as JSON.
    """

    question: str
    answer: str
    columns: bytes = b"{}"


JSONL: Final = (".jsonl", ".ndjson", ".json")


# a hub has hundreds of environments with the same file
@lru_cache(maxsize=8)
def read_rows(path: str, question: str, answer: str, answer_after: str) -> tuple[Row, ...]:
    """Return every row of the file, in order; hundreds of environments share one copy.

    Args:
        path: a file ending in .jsonl or .parquet.
        question: name of the column that holds the question.
        answer: name of the column that holds the reference answer.
        answer_after: keep only the text after the last occurrence of this in the answer; empty
            keeps all.

    Raises:
        ConfigError: if the file is missing or empty, or its ending is unknown.
        DataError: if a row is malformed; names its line (JSONL) or row number (Parquet), from 1.
    """
    if not Path(path).is_file():
        raise ConfigError("path", path, "there is no such file")
    if not path.lower().endswith((*JSONL, *PARQUET)):
        raise ConfigError("path", path, f"a file ending in {', '.join((*JSONL, *PARQUET))}")
    rows = []
    for line, record in data_rows.read_rows(path, "path"):
        question_text, answer_text = (
            _column_text(path, line, record, column) for column in (question, answer)
        )
        reference = _text_after(path, line, answer_text, answer, answer_after)
        columns = msgspec.json.encode(fitting_columns(record))
        rows.append(Row(question_text, reference, columns))
    if not rows:
        raise ConfigError("path", path, "the file holds no rows")
    return tuple(rows)


def _column_text(path: str, line: int, record: dict[str, Any], column: str) -> str:
    if column not in record:
        raise DataError(
            path, line, f"no column {column!r}; it has {', '.join(sorted(record)) or 'none'}"
        )
    value = record[column]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        raise DataError(path, line, f"column {column!r} holds {value!r}, not a text")
    return value


def _text_after(path: str, line: int, text: str, column: str, marker: str) -> str:
    if not marker:
        return text
    _, separator, tail = text.rpartition(marker)
    if not separator or not tail.strip():
        raise DataError(path, line, f"column {column!r} holds nothing after {marker!r}")
    return tail.strip()
