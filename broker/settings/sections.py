"""Parses plain values into pydantic sections, strictly; names the first bad value."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import pydantic

from broker.errors import ConfigError
from broker.settings.foreign_names import own_name
from broker.system.redaction import HIDDEN, is_secret_name

M = TypeVar("M", bound=pydantic.BaseModel)


def parse(place: str, value: Any, model: type[M]) -> M:
    """Parse one section as strictly as JSON: no quoted numbers, but lists for tuples.

    Args:
        place: its key, for example ``rollout.engine_args``.
        value: mappings, lists, strings, numbers, booleans and null.

    Raises:
        ConfigError: if a value is not allowed; names the first one, and for an unknown key the
            nearest known one.
    """
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        raise ConfigError(
            place, value, "only mappings, lists, strings, numbers, booleans and null"
        ) from None
    try:
        return model.model_validate_json(text, strict=True)
    except pydantic.ValidationError as error:
        raise _config_error(place, model, error) from None


def _config_error(
    place: str, model: type[pydantic.BaseModel], error: pydantic.ValidationError
) -> ConfigError:
    """Return the first problem; unknown keys first, as a misspelt key leaves one missing."""
    problem = min(error.errors(), key=lambda details: details["type"] != "extra_forbidden")
    location = [str(part) for part in problem["loc"]]
    key = ".".join((place, *location))
    if problem["type"] == "extra_forbidden":
        *above, name = location
        return ConfigError(
            key,
            problem["input"],
            unknown(name, _keys_at(model, above), ".".join((place, *above)), problem["input"]),
        )
    if problem["type"] == "missing":
        return ConfigError(key, None, "it must be given")
    value = HIDDEN if is_secret_name(location[-1] if location else "") else problem["input"]
    return ConfigError(key, value, sentence(problem["msg"]))


def first_problem(error: pydantic.ValidationError) -> str:
    """Return key and reason of the first value that is not allowed, in one line."""
    problem = error.errors()[0]
    return f"{'.'.join(map(str, problem['loc']))}: {sentence(problem['msg'])}"


def sentence(message: str) -> str:
    """Return a message of pydantic without its prefix, for use within a line."""
    message = message.removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


def _keys_at(model: Any, location: Sequence[str]) -> Sequence[str]:
    """Return the keys of a section below a location such as ``rewards.0``."""
    for part in location:
        field = model.model_fields.get(part) if hasattr(model, "model_fields") else None
        if field is not None:
            model = _inner_section(field.annotation)
    return list(model.model_fields) if hasattr(model, "model_fields") else []


def _inner_section(annotation: Any) -> Any:
    """Return the section in an annotation: ``Reward`` of ``list[Reward]`` or optional."""
    if hasattr(annotation, "model_fields"):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        if hasattr(inner := _inner_section(argument), "model_fields"):
            return inner
    return annotation


def unknown(
    name: str, names: Mapping[str, object] | Sequence[str], place: str, value: object = None
) -> str:
    """Return the message for an unknown key.

    Args:
        names: the known keys.
        place: the key above them, empty at the top.
        value: of the key.
    """
    prefix = f"{place}." if place else ""
    if own := own_name(prefix + name, value):
        return f"unknown key, did you mean {own!r}?"
    if close := difflib.get_close_matches(name, list(names), n=1):
        return f"unknown key, did you mean {prefix + close[0]!r}?"
    return f"unknown key, known here: {', '.join(names) or 'none'}"
