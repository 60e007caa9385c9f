"""Finds columns of a row, also in nested ones (``reward_model.ground_truth``)."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

Row = dict[str, Any]

_MAX_LISTED: Final = 20


def drop_nulls(value: Any) -> Any:
    """Return a value without the keys that are null: tables have them where rows differ."""
    if isinstance(value, dict):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [drop_nulls(item) for item in value]
    return value


def column_value(row: Row, name: str) -> Any:
    """Return the value of a column, None if the row has none; dots lead into nested columns."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            return None
        value = value[part]
    return value


def column_names(row: Row) -> str:
    """Return the names of a row's columns for an error message, nested ones with dots."""
    names: list[str] = []
    for name in sorted(row):
        value = row[name]
        inner = sorted(value) if isinstance(value, dict) else []
        names += [f"{name}.{key}" for key in inner] or [name]
    listed = ", ".join(names[:_MAX_LISTED]) or "none"
    return listed + (", …" if len(names) > _MAX_LISTED else "")


def digest_row(row: Row) -> bytes:
    """Return a digest that equal rows share."""
    text = json.dumps(row, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
