"""Question and answer rows from a JSONL or Parquet file; a bad row is named by file and line."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from broker.errors import ConfigError, DataError
from rlearner_text import data_rows
from rlearner_text.data_rows import PARQUET

Row = tuple[str, str]  # question, answer

JSONL: Final = (".jsonl", ".ndjson", ".json")


@lru_cache(maxsize=8)
def read_rows(path: str, question: str, answer: str, answer_after: str) -> tuple[Row, ...]:
    """Every row of the file, in order; hundreds of environments share one copy.

    Args:
        path: a file ending in .jsonl or .parquet.
        question: name of the column that holds the question.
        answer: name of the column that holds the reference answer.
        answer_after: keep only what follows the last occurrence of this text in the answer; empty keeps all.

    Raises:
        ConfigError: no such file, an ending that is not known, a missing column (Parquet), no rows.
        DataError: a malformed row, with its line (JSONL) or row number (Parquet), counted from 1.
    """
    if not Path(path).is_file():
        raise ConfigError("path", path, "there is no such file")
    if not path.lower().endswith((*JSONL, *PARQUET)):
        raise ConfigError("path", path, f"a file ending in {', '.join((*JSONL, *PARQUET))}")
    rows = tuple(
        (
            _text(path, line, record, question),
            _after(path, line, _text(path, line, record, answer), answer, answer_after),
        )
        for line, record in data_rows.read_rows(path, "path")
    )
    if not rows:
        raise ConfigError("path", path, "the file holds no rows")
    return rows


def _text(path: str, line: int, record: dict[str, Any], column: str) -> str:
    if column not in record:
        raise DataError(path, line, f"no column {column!r}; it has {', '.join(sorted(record)) or 'none'}")
    value = record[column]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        raise DataError(path, line, f"column {column!r} holds {value!r}, not a text")
    return value


def _after(path: str, line: int, text: str, column: str, marker: str) -> str:
    if not marker:
        return text
    _, found, rest = text.rpartition(marker)
    if not found or not rest.strip():
        raise DataError(path, line, f"column {column!r} holds nothing after {marker!r}")
    return rest.strip()
