"""Checks values against the part of JSON Schema that a judge's answer needs.

Objects whose properties are numbers, integers, booleans and texts, with ``required``,
``additionalProperties``, ``minimum``, ``maximum`` and ``enum``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from broker.errors import ConfigError

Schema = Mapping[str, Any]

_OBJECT_WORDS: Final = (
    "type", "properties", "required", "additionalProperties", "title", "description", "$schema",
)  # fmt: skip
_PROPERTY_WORDS: Final = ("type", "minimum", "maximum", "enum", "title", "description")
_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "string": (str,),
}


def check_object_schema(key: str, schema: Schema) -> None:
    """Check that a schema is an object's, and uses only the words above.

    Args:
        key: of the schema, for messages.

    Raises:
        ConfigError: if it is not; names the first key.
    """
    _check_words(key, schema, _OBJECT_WORDS)
    if schema.get("type") != "object":
        raise ConfigError(f"{key}.type", schema.get("type"), "expected 'object'")
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or not properties:
        raise ConfigError(f"{key}.properties", properties, "expected a mapping of names to schemas")
    for name, inner in properties.items():
        place = f"{key}.properties.{name}"
        if not isinstance(inner, Mapping):
            raise ConfigError(place, inner, "expected a mapping")
        _check_words(place, inner, _PROPERTY_WORDS)
        if inner.get("type") not in _TYPES:
            raise ConfigError(f"{place}.type", inner.get("type"), f"one of {', '.join(_TYPES)}")
        for word in ("minimum", "maximum"):
            if word in inner and not _is_number(inner[word]):
                raise ConfigError(f"{place}.{word}", inner[word], "expected a number")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(name in properties for name in required):
        raise ConfigError(f"{key}.required", required, "expected a list of names of properties")


def find_violation(value: object, schema: Schema) -> str:
    """Return how a value contradicts a checked schema, in a few words; empty if it does not."""
    if not isinstance(value, Mapping):
        return "it is not a JSON object"
    properties = schema["properties"]
    for name in schema.get("required", []):
        if name not in value:
            return f"{name!r} is missing"
    for name, item in value.items():
        if name not in properties:
            if schema.get("additionalProperties", True) is False:
                return f"{name!r} is no property of the schema"
        elif problem := _find_item_violation(item, properties[name]):
            return f"{name!r} {problem}"
    return ""


def _find_item_violation(item: object, schema: Schema) -> str:
    kind = schema["type"]
    is_whole = kind == "integer" and isinstance(item, float) and item.is_integer()
    if not isinstance(item, _TYPES[kind]) and not is_whole:
        return f"must be of type {kind}"
    if isinstance(item, bool) and kind != "boolean":
        return f"must be of type {kind}"
    if "enum" in schema and item not in schema["enum"]:
        return f"must be one of {', '.join(map(str, schema['enum']))}"
    if _is_number(item):
        minimum = schema.get("minimum", item)
        maximum = schema.get("maximum", item)
        if not minimum <= item <= maximum:
            return f"must be from {minimum:g} to {maximum:g}"
    return ""


def _check_words(key: str, schema: Schema, words: tuple[str, ...]) -> None:
    for word in schema:
        if word not in words:
            raise ConfigError(f"{key}.{word}", schema[word], f"known here: {', '.join(words)}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
