"""Makes the row of a data set a plain mapping of JSON values, bounded in size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

# of the row as JSON: what rewards read of a task, repeated in each of its groups
MAX_ROW_BYTES: Final = 1 << 20
# values and keys in a row: a message has few in all (``broker.contract.sizes``)
MAX_ROW_ITEMS: Final = 20_000


class BadRowError(ValueError):
    """A row that is no mapping of JSON values by name, or is too large."""


def plain_row(row: object) -> dict[str, Any]:
    """Return the row as JSON values; times become texts, bytes base64, NaN null.

    Raises:
        BadRowError: if it is not a mapping with names of columns, cannot be expressed in JSON, or
            is too large; names the column.
    """
    if not isinstance(row, Mapping) or not all(isinstance(name, str) for name in row):
        raise BadRowError(f"a {type(row).__name__}, not a mapping of names to JSON values")
    sizes = {name: _measure_column(name, value) for name, value in row.items()}
    if sum(sizes.values()) > MAX_ROW_BYTES:
        largest = max(sizes, key=lambda name: sizes[name])
        raise BadRowError(
            f"a row of {sum(sizes.values())} bytes, most of them in {largest!r}; the limit is "
            f"{MAX_ROW_BYTES}"
        )
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(row))
    if (num_items := _count_items(plain)) > MAX_ROW_ITEMS:
        raise BadRowError(f"a row of {num_items} values; the limit is {MAX_ROW_ITEMS}")
    return plain


def fitting_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a data set's row that a plain row can have.

    Leaves out columns that JSON cannot express, and from the end those for which there is no room.
    """
    fitting: dict[str, Any] = {}
    num_bytes = num_items = 0
    for name, value in row.items():
        try:
            column = plain_row({name: value})
        except BadRowError:
            continue
        size = _measure_column(name, column[name])
        items = _count_items(column)
        has_room = num_bytes + size <= MAX_ROW_BYTES and num_items + items <= MAX_ROW_ITEMS
        if has_room:
            fitting |= column
            num_bytes += size
            num_items += items
    return fitting


def _measure_column(name: str, value: object) -> int:
    try:
        # messages between processes are MessagePack, which is stricter about large numbers
        plain = msgspec.json.decode(msgspec.json.encode(value))
        msgspec.msgpack.encode(plain)
        return len(name) + len(msgspec.json.encode(plain))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadRowError(f"a row whose column {name!r} JSON cannot express: {error}") from None


def _count_items(value: object) -> int:
    if isinstance(value, dict):
        return 2 * len(value) + sum(map(_count_items, value.values()))
    if isinstance(value, list):
        return len(value) + sum(map(_count_items, value))
    return 0
