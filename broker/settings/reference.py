"""Describes every setting of a run, from the sections' classes and the comments in them."""

from __future__ import annotations

import ast
import inspect
import io
import json
import re
import textwrap
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, get_args

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from broker.settings.config import Section
from broker.settings.run_settings import NAMED_SECTIONS, section_types

# What a key's ending says about its value.
UNITS: Final[Mapping[str, str]] = {
    "_s": "seconds", "_minutes": "minutes", "_mib": "MiB", "_gib": "GiB", "_tokens": "tokens",
    "_tokens_per_s": "tokens per second", "_port": "TCP port",
}  # fmt: skip
REQUIRED: Final = "required"
_TYPES: Final = {"integer": "whole number", "number": "number", "string": "text"}
_BOUNDS: Final = {
    "minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most",
    "exclusiveMaximum": "below",
}  # fmt: skip


@dataclass(frozen=True)
class SettingDescription:
    """One setting.

    Attributes:
        key: for example ``train.lr``; DOMAIN stands for a domain's name, and ``[]`` for each entry
            of a list.
        default: as YAML in one line, or ``required``.
        allowed: the values, in words.
        unit: empty if the value has none.
    """

    key: str
    meaning: str
    default: str
    allowed: str
    unit: str


def describe_settings() -> Iterator[SettingDescription]:
    """Yield all settings of a run, section by section."""
    for name, section_type in section_types().items():
        entry = f"{name}.{re.sub('ies$', 'y', name).removesuffix('s').upper()}"
        yield from _describe_section(entry if name in NAMED_SECTIONS else name, section_type)


def _describe_section(prefix: str, section_type: type[Section]) -> Iterator[SettingDescription]:
    schema = section_type.model_json_schema()
    meanings = read_meanings(section_type)
    for name, field in section_type.model_fields.items():
        key = f"{prefix}.{name}"
        value_schema = schema["properties"][name]
        nested = _find_section(field.annotation)
        if nested is None or value_schema.get("default", "") is None:
            allowed = _describe_values(value_schema)
            yield SettingDescription(
                key, meanings[name], _describe_default(field), allowed, _find_unit(name)
            )
        if nested is not None:
            is_list = value_schema.get("type") == "array"
            yield from _describe_section(f"{key}[]" if is_list else key, nested)


def _find_section(annotation: Any) -> type[Section] | None:
    """Return the section that a field holds, alone, in a list, or instead of null."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    sections = (_find_section(argument) for argument in get_args(annotation))
    return next((section for section in sections if section is not None), None)


def _find_unit(name: str) -> str:
    endings = [ending for ending in UNITS if f"_{name}".endswith(ending)]
    return UNITS[max(endings, key=len)] if endings else ""


def _describe_default(field: FieldInfo) -> str:
    if field.is_required():
        return REQUIRED
    value = field.get_default(call_default_factory=True, validated_data={})
    return REQUIRED if value is PydanticUndefined else json.dumps(value)


def _describe_values(schema: Mapping[str, Any]) -> str:
    """Describe the values that a JSON schema allows."""
    if "anyOf" in schema:
        return " or ".join(_describe_values(choice) for choice in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return ", ".join(str(value) for value in schema.get("enum", [schema.get("const")]))
    if "prefixItems" in schema:
        return f"[{', '.join(_describe_values(item) for item in schema['prefixItems'])}]"
    match schema.get("type"):
        case "array":
            return f"list of {_describe_values(schema.get('items', {}))}"
        case "boolean":
            return "true, false"
        case "null":
            return "null"
        case "integer" | "number" | "string" as kind:
            bounds = [f"{word} {schema[key]:g}" for key, word in _BOUNDS.items() if key in schema]
            return " ".join((_TYPES[kind], " and ".join(bounds))).strip()
    return "mapping"


@cache
def read_meanings(section_type: type[Section]) -> Mapping[str, str]:
    """Return the comments above and behind a section's fields, by field; empty where none is."""
    meanings: dict[str, str] = dict.fromkeys(section_type.model_fields, "")
    for base in reversed(section_type.__mro__):
        if issubclass(base, Section) and base is not Section:
            own = _read_class(inspect.getsource(base))
            # A class that only changes a default keeps the comment of its base.
            meanings |= {name: text for name, text in own.items() if text and name in meanings}
    return meanings


def _read_class(source: str) -> dict[str, str]:
    source = textwrap.dedent(source)
    comments: dict[int, str] = {}
    alone: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments[token.start[0]] = token.string.lstrip("# ")
            if not token.line[: token.start[1]].strip():
                alone.add(token.start[0])
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    meanings = {}
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            first = node.lineno
            while first - 1 in alone:
                first -= 1
            lines = range(first, (node.end_lineno or node.lineno) + 1)
            meanings[node.target.id] = " ".join(
                comments[line] for line in lines if line in comments
            )
    return meanings
