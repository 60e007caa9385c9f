"""Turns settings and rows that Python code passes into what the commands read."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from broker.errors import ConfigError, UserError


def plain_value(value: Any, key: str) -> Any:
    """Return a value as JSON holds it: paths and dates become texts, NumPy's numbers plain ones.

    Raises:
        ConfigError: for a value of another type; names its key.
    """
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if callable(date_text := getattr(value, "isoformat", None)):
        return date_text()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(name): plain_value(item, f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_value(item, f"{key}.{index}") for index, item in enumerate(value)]
    if callable(to_list := getattr(value, "tolist", None)):
        return plain_value(to_list(), key)
    raise ConfigError(
        key, value, "a text, a finite number, true, false, None, or a list or mapping of these"
    )


def format_overrides(sections: Mapping[str, Any]) -> list[str]:
    """Return nested settings as the command's overrides: ``train.steps=3``.

    Raises:
        ConfigError: if a name has a dot in it, or a value is not plain.
    """
    for name in sections:
        if "." in name:
            section, _, rest = name.partition(".")
            example = f'nested mappings: {section}={{"{rest}": ...}}'
            raise ConfigError(name, sections[name], example)
    return list(_flatten(plain_value(sections, "settings"), ""))


def _flatten(value: Any, key: str) -> Iterator[str]:
    if isinstance(value, dict) and (value or not key):
        for name, item in value.items():
            yield from _flatten(item, f"{key}.{name}".lstrip("."))
    else:
        # YAML reads JSON, but not its escapes of characters beyond 16 bits.
        yield f"{key}={json.dumps(value, ensure_ascii=False)}"


def read_dataset(dataset: Any) -> list[dict[str, Any]]:
    """Return the rows of a list of mappings, a pandas DataFrame, or a ``datasets.Dataset``.

    Raises:
        UserError: if there are none, or one is not a mapping of plain values.
    """
    if hasattr(dataset, "iterrows"):  # a DataFrame: its iterator yields columns
        # It has NaN for values that are missing.
        present = dataset.astype(object).where(dataset.notna(), None)
        dataset = present.to_dict(orient="records")
    if isinstance(dataset, Mapping) or not isinstance(dataset, Iterable):
        split = (
            f"; choose a split: {', '.join(map(str, dataset))}" if hasattr(dataset, "keys") else ""
        )
        raise UserError(f"dataset: expected rows, found {type(dataset).__name__}{split}")
    rows = []
    for number, row in enumerate(dataset):
        if not isinstance(row, Mapping):
            raise UserError(
                f"dataset: row {number} is {type(row).__name__}, not a mapping of columns"
            )
        rows.append(plain_value(row, f"dataset.{number}"))
    if not rows:
        raise UserError("dataset: it has no rows")
    return rows
