"""Rows of a JSONL or Parquet file, with the number that error messages name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from broker.contract import strict
from broker.errors import ConfigError, DataError

Row = dict[str, Any]


def read_rows(path: str | Path, key: str = "data") -> Iterator[tuple[int, Row]]:
    """(line, row) of every row: lines of a JSONL file from 1, empty ones skipped; rows of a Parquet file (``.parquet``) from 1.

    Args:
        key: of the configuration, for error messages.

    Raises:
        ConfigError: no such file, or no Parquet file, or pyarrow is missing.
        DataError: a line that is no JSON object; names file and line.
    """
    return _parquet(path, key) if str(path).endswith(".parquet") else _jsonl(path, key)


def _jsonl(path: str | Path, key: str) -> Iterator[tuple[int, Row]]:
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, _object(str(path), number, line)
    except OSError as error:
        raise ConfigError(key, str(path), f"the file cannot be read: {error.strerror}") from None


def _object(path: str, number: int, line: bytes) -> Row:
    try:
        row = strict.loads(line.decode())
    except UnicodeDecodeError as error:
        raise DataError(path, number, f"not UTF-8: {error.reason}") from None
    except strict.BadJson as error:
        raise DataError(path, number, f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise DataError(path, number, "the row is no object")
    return row


def _parquet(path: str | Path, key: str) -> Iterator[tuple[int, Row]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError:
        raise ConfigError(key, str(path), "Parquet needs pyarrow: pip install 'rlearner[parquet]'") from None
    number = 0
    try:
        for batch in ParquetFile(path).iter_batches():
            for number, row in enumerate(batch.to_pylist(), start=number + 1):  # noqa: B020 - goes on from the batch before
                yield number, row
    except OSError as error:
        raise ConfigError(key, str(path), f"the file cannot be read: {error.strerror or error}") from None
    except ArrowException as error:
        raise ConfigError(key, str(path), f"no Parquet file: {' '.join(str(error).split())[:200]}") from None
