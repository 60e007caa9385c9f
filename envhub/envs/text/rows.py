"""Question and answer rows from a JSONL or Parquet file; a bad row is named by file and line."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import msgspec

from broker.errors import ConfigError, DataError, UserError

Row = tuple[str, str]  # question, answer

PARQUET: Final = (".parquet", ".pq")
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
    file = Path(path)
    if not file.is_file():
        raise ConfigError("path", path, "there is no such file")
    if file.suffix.lower() in PARQUET:
        records = _parquet(file, question, answer)
    elif file.suffix.lower() in JSONL:
        records = _jsonl(file)
    else:
        raise ConfigError("path", path, f"a file ending in {', '.join(JSONL + PARQUET)}")
    rows = tuple(
        (
            _text(path, line, record, question),
            _after(path, line, _text(path, line, record, answer), answer, answer_after),
        )
        for line, record in records
    )
    if not rows:
        raise ConfigError("path", path, "the file holds no rows")
    return rows


def _jsonl(file: Path) -> list[tuple[int, dict[str, Any]]]:
    records = []
    decoder = msgspec.json.Decoder(dict[str, Any])
    for line, data in enumerate(file.read_bytes().split(b"\n"), start=1):
        if not data.strip():
            continue
        try:
            records.append((line, decoder.decode(data)))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DataError(str(file), line, f"not a JSON object: {error}") from None
    return records


def _parquet(file: Path, question: str, answer: str) -> list[tuple[int, dict[str, Any]]]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise UserError(f"{file}: reading Parquet needs pyarrow; pip install 'rlearner[parquet]'") from None
    try:
        names = parquet.read_schema(file).names
        for key, column in (("question", question), ("answer", answer)):
            if column not in names:
                raise ConfigError(key, column, f"a column of {file}, which has {', '.join(names)}")
        return list(enumerate(parquet.read_table(file, columns=[question, answer]).to_pylist(), start=1))
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{file}: not a readable Parquet file: {' '.join(str(error).split())}") from None


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
