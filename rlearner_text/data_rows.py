"""Reads rows of a JSONL or Parquet file, with their numbers for error messages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from broker.contract import strict
from broker.errors import ConfigError, DataError

Row = dict[str, Any]

PARQUET: Final = (".parquet", ".pq")


def read_rows(path: str | Path, key: str = "data") -> Iterator[tuple[int, Row]]:
    """Yield (number from 1, row): non-empty lines of a JSONL file, or rows of a Parquet file.

    Args:
        key: of the configuration, for error messages.

    Raises:
        ConfigError: if the file cannot be read, is not a Parquet file, or pyarrow is missing.
        DataError: if a line is not a JSON object; names file and line.
    """
    return (
        _read_parquet(path, key) if str(path).lower().endswith(PARQUET) else _read_jsonl(path, key)
    )


def _read_jsonl(path: str | Path, key: str) -> Iterator[tuple[int, Row]]:
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, _parse_object(str(path), number, line)
    except OSError as error:
        raise ConfigError(key, str(path), f"the file cannot be read: {error.strerror}") from None


def _parse_object(path: str, number: int, line: bytes) -> Row:
    try:
        row = strict.parse_json(line.decode())
    except UnicodeDecodeError as error:
        raise DataError(path, number, f"not UTF-8: {error.reason}") from None
    except strict.BadJson as error:
        raise DataError(path, number, f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise DataError(path, number, "the row is not an object")
    return row


def _read_parquet(path: str | Path, key: str) -> Iterator[tuple[int, Row]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError:
        raise ConfigError(
            key, str(path), "Parquet needs pyarrow: pip install 'rlearner[parquet]'"
        ) from None
    number = 0
    try:
        for batch in ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except OSError as error:
        raise ConfigError(
            key, str(path), f"the file cannot be read: {error.strerror or error}"
        ) from None
    except ArrowException as error:
        raise ConfigError(
            key, str(path), f"not a Parquet file: {' '.join(str(error).split())[:200]}"
        ) from None
