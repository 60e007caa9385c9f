"""Encodes plain data as JSON between a program and its tests. Runs inside; imports little.

Decoding gives exact builtin types: a subclass travels as the builtin that it derives from, and an
object of any other class is refused. So a program's ``__eq__`` never decides a comparison in its
tests.
"""

from __future__ import annotations

import builtins
import collections
from collections.abc import Callable
from typing import Any

Converter = Callable[[Any], Any]
# Beyond it an integer travels in base 16: base 10 takes quadratic time and has a limit.
SMALL = 1 << 63
SEQUENCES: dict[str, Any] = {
    kind.__name__: kind for kind in (list, tuple, set, frozenset, collections.deque)
}
TYPES: dict[str, Any] = {
    name: value for name, value in vars(builtins).items() if isinstance(value, type)
}
MUTABLE = (list, dict, set, bytearray, collections.deque)


class Garbled(ValueError):
    """Raised when data does not have the form that ``to_json`` makes."""


def to_json(value: Any, convert: Converter) -> Any:
    """Return the value in a form that ``json`` can write.

    Args:
        value: plain data: None, bool, int, float, complex, str, bytes, bytearray, list, tuple,
            dict, set, frozenset, range, deque, Decimal, Fraction, a builtin type, an array or
            scalar of numpy (as list or number), or nested.
        other: makes JSON of anything else, or raises.
    """
    if value is None or isinstance(value, (bool, float, str)):
        return value
    if isinstance(value, int):
        return value if -SMALL < value < SMALL else ["int", hex(value)]
    for name, kind in SEQUENCES.items():
        if isinstance(value, kind):
            return [name, [to_json(item, convert) for item in value]]
    if isinstance(value, dict):
        return [
            "dict",
            [[to_json(key, convert), to_json(item, convert)] for key, item in value.items()],
        ]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes" if isinstance(value, bytes) else "bytearray", value.hex()]
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, range):
        return [
            "range",
            *(to_json(part, convert) for part in (value.start, value.stop, value.step)),
        ]
    if isinstance(value, type):
        name = value.__name__
        return ["type", name] if TYPES.get(name) is value else convert(value)
    module = type(value).__module__
    if module in ("decimal", "fractions") and type(value).__name__ in ("Decimal", "Fraction"):
        return ["number", type(value).__name__, str(value)]
    if module == "numpy" and hasattr(value, "tolist"):
        return to_json(value.tolist(), convert)
    return convert(value)


def from_json(node: Any, convert: Converter) -> Any:
    """Return the value given to ``to_json``; ``convert`` reads other nodes; may raise Garbled."""
    if node is None or type(node) in (bool, int, float, str):
        return node
    try:
        return _read_node(node, convert)
    except (TypeError, ValueError, IndexError, OverflowError, ArithmeticError) as error:
        raise Garbled(str(error)) from None


def _read_node(node: Any, convert: Converter) -> Any:
    if type(node) is not list:
        raise Garbled(f"a {type(node).__name__}")
    tag, *fields = node
    if tag in SEQUENCES:
        return SEQUENCES[tag]([from_json(item, convert) for item in fields[0]])
    if tag == "dict":
        return {from_json(key, convert): from_json(item, convert) for key, item in fields[0]}
    if tag == "int":
        return int(fields[0], 16)
    if tag in ("bytes", "bytearray"):
        return TYPES[tag].fromhex(fields[0])
    if tag == "complex":
        return complex(float(fields[0]), float(fields[1]))
    if tag == "range":
        return range(*(from_json(part, convert) for part in fields))
    if tag == "type":
        return TYPES[fields[0]]
    if tag == "number":
        if fields[0] == "Decimal":
            from decimal import Decimal

            return Decimal(fields[1])
        from fractions import Fraction

        return Fraction(fields[1])
    return convert(node)


def put_back(old: Any, new: Any) -> None:
    """Make a mutable container equal to another of its type, in place."""
    if isinstance(old, (list, bytearray)):
        old[:] = new
    elif isinstance(old, (set, dict)):
        old.clear()
        old.update(new)
    else:
        old.clear()
        old.extend(new)
