"""Plain values to a pydantic section and back, as strictly as a file is read, and what is said of the first one that is
wrong.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import pydantic

from broker.errors import ConfigError

M = TypeVar("M", bound=pydantic.BaseModel)


def parse(where: str, value: Any, model: type[M]) -> M:
    """One section. Strict as JSON is: a quoted number is no number, but a list may fill a tuple.

    Args:
        where: its key, for example ``rollout.engine_args``.
        value: mappings, lists, strings, numbers, booleans and null.

    Raises:
        ConfigError: the first bad key, its value and what is allowed; unknown keys suggest the nearest.
    """
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        raise ConfigError(where, value, "only mappings, lists, strings, numbers, booleans and null") from None
    try:
        return model.model_validate_json(text, strict=True)
    except pydantic.ValidationError as error:
        raise _config_error(where, model, error) from None


def _config_error(where: str, model: type[pydantic.BaseModel], error: pydantic.ValidationError) -> ConfigError:
    """The first problem; unknown keys before all others, for a misspelt key also leaves a missing one."""
    problem = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
    location = [str(part) for part in problem["loc"]]
    key = ".".join((where, *location))
    if problem["type"] == "extra_forbidden":
        return ConfigError(
            key,
            problem["input"],
            unknown(location[-1], _keys_at(model, location[:-1]), ".".join((where, *location[:-1]))),
        )
    if problem["type"] == "missing":
        return ConfigError(key, None, "it must be given")
    return ConfigError(key, problem["input"], sentence(problem["msg"]))


def sentence(message: str) -> str:
    """What pydantic says, to stand within a line; without the words that it puts before what a validator of ours
    says.
    """
    message = message.removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


def _keys_at(model: Any, location: Sequence[str]) -> Sequence[str]:
    """The keys that a section knows below a location such as ``rewards.0``."""
    for part in location:
        field = model.model_fields.get(part) if hasattr(model, "model_fields") else None
        if field is not None:
            model = _inner(field.annotation)
    return list(model.model_fields) if hasattr(model, "model_fields") else []


def _inner(annotation: Any) -> Any:
    """The section inside an annotation: ``Reward`` of ``list[Reward]`` or of ``Reward | None``."""
    if hasattr(annotation, "model_fields"):
        return annotation
    return next(
        (
            inner
            for argument in getattr(annotation, "__args__", ())
            if hasattr(inner := _inner(argument), "model_fields")
        ),
        annotation,
    )


def unknown(name: str, names: Mapping[str, object] | Sequence[str], where: str) -> str:
    """What is said of a key that nobody knows.

    Args:
        names: those that are known there.
        where: the key above them, empty at the top.
    """
    prefix = f"{where}." if where else ""
    close = difflib.get_close_matches(name, list(names), n=1)
    return (
        f"unknown key, did you mean {prefix + close[0]!r}?"
        if close
        else f"unknown key, known here: {', '.join(names) or 'none'}"
    )
