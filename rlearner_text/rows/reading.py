"""Reads the rows of a data set, with their numbers for error messages."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final

from broker.contract import strict
from broker.errors import ConfigError, DataError
from rlearner_text.rows.columns import Row, drop_nulls
from rlearner_text.rows.sources import CSV, PARQUET, DataSource, split_error

# Bytes of one CSV field; the library's own limit is 128 KiB.
_MAX_FIELD: Final = 1 << 26


def read_rows(source: DataSource | str | Path, key: str = "data") -> Iterator[tuple[int, Row]]:
    """Yield (number from 1, row) without null columns.

    The number is that of the line in a JSON Lines or CSV file, else that of the row.

    Args:
        key: of the configuration, for error messages.

    Raises:
        ConfigError: if the data set cannot be read, or a package that reads it is missing.
        DataError: if a row is not an object; names file and line.
    """
    if not isinstance(source, DataSource):
        source = DataSource(str(source))
    kind = source.kind
    if kind == "file":
        rows = _read_file(source.path, key)
    elif kind == "folder":
        rows = _read_files(source.list_files(key), key)
    else:
        rows = enumerate(_load_dataset(source, key), start=1)
    for number, row in islice(rows, source.max_rows):
        yield number, drop_nulls(row)


def _read_files(paths: list[str], key: str) -> Iterator[tuple[int, Row]]:
    """Yield the rows of several files, numbered throughout."""
    rows = (row for path in paths for _, row in _read_file(path, key))
    return enumerate(rows, start=1)


def _read_file(path: str, key: str) -> Iterator[tuple[int, Row]]:
    ending = path.lower()
    if ending.endswith(PARQUET):
        return _read_parquet(path, key)
    return _read_csv(path, key) if ending.endswith(CSV) else _read_json(path, key)


def _read_json(path: str, key: str) -> Iterator[tuple[int, Row]]:
    """Yield the objects of JSON lines, or of one JSON list."""
    try:
        with open(path, "rb") as file:
            is_list = file.read(64).lstrip()[:1] == b"[" and path.lower().endswith(".json")
            file.seek(0)
            if is_list:
                items = _parse_json(path, 1, file.read())
                yield from ((n, _check_object(path, n, row)) for n, row in enumerate(items, 1))
                return
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, _check_object(path, number, _parse_json(path, number, line))
    except OSError as error:
        raise ConfigError(key, path, f"the file cannot be read: {error.strerror}") from None


def _parse_json(path: str, number: int, data: bytes) -> Any:
    try:
        return strict.parse_json(data.decode())
    except UnicodeDecodeError as error:
        raise DataError(path, number, f"not UTF-8: {error.reason}") from None
    except strict.BadJson as error:
        raise DataError(path, number, f"not JSON: {error}") from None


def _check_object(path: str, number: int, row: Any) -> Row:
    if not isinstance(row, dict):
        raise DataError(path, number, "the row is not an object")
    return row


def _read_csv(path: str, key: str) -> Iterator[tuple[int, Row]]:
    csv.field_size_limit(_MAX_FIELD)
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            for row in reader:
                if None in row or None in row.values():
                    problem = f"not as many fields as the header, {len(reader.fieldnames or ())}"
                    raise DataError(path, reader.line_num, problem)
                yield reader.line_num, dict(row)
    except OSError as error:
        raise ConfigError(key, path, f"the file cannot be read: {error.strerror}") from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigError(key, path, f"not a CSV file in UTF-8: {error}") from None


def _read_parquet(path: str, key: str) -> Iterator[tuple[int, Row]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError:
        raise _not_installed(key, path, "Parquet needs pyarrow", "parquet") from None
    number = 0
    try:
        for batch in ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except OSError as error:
        raise ConfigError(
            key, path, f"the file cannot be read: {error.strerror or error}"
        ) from None
    except ArrowException as error:
        raise ConfigError(
            key, path, f"not a Parquet file: {' '.join(str(error).split())[:200]}"
        ) from None


def _load_dataset(source: DataSource, key: str) -> Any:
    """Return a data set of ``datasets``, one split, which yields rows."""
    try:
        import datasets
    except ModuleNotFoundError as error:
        noun = "this folder" if source.kind == "saved" else "a data set of the hub"
        needs = f"{noun} needs {error.name}"
        raise _not_installed(key, source.path, needs, "datasets") from None
    datasets.disable_progress_bars()
    try:
        if source.kind == "saved":
            return datasets.load_from_disk(source.saved_folder(key))
        source.check(key)
        name, _, commit = source.path.partition("@")
        loaded = datasets.load_dataset(
            name,
            source.subset or None,
            split=source.split or None,
            revision=commit,
            streaming=source.max_rows is not None,
        )
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        problem = " ".join(str(error).split())[:300]
        raise ConfigError(key, source.path, f"datasets cannot load it: {problem}") from None
    if not source.split and len(loaded) > 1:
        raise split_error(key, source.path, list(loaded))
    return loaded if source.split else next(iter(loaded.values()))


def _not_installed(key: str, path: str, needs: str, extra: str) -> ConfigError:
    return ConfigError(key, path, f"{needs}: pip install 'rlearner[{extra}]'")
