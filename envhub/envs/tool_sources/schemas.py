"""Checks tools and the arguments of calls against JSON Schema."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from broker.errors import NotInstalled
from broker.system.fault import clean
from envhub.envs.tool_sources.base import SourceFailed, ToolSpec

# what chat templates and OpenAI's protocol accept
NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
MAX_SCHEMA_BYTES: Final = 1 << 16
MAX_TOOLS: Final = 256


def require_package() -> None:
    """Check that jsonschema is installed.

    Raises:
        NotInstalled: if it is not.
    """
    try:
        import jsonschema  # noqa: F401
    except ImportError:
        raise NotInstalled(
            "environment tools needs jsonschema: pip install 'rlearner[tools]'"
        ) from None


def check_specs(source: str, specs: Sequence[ToolSpec]) -> None:
    """Check that a source's tools can be shown to a policy.

    Raises:
        SourceFailed: if there is none, a name cannot be written, or a schema is not valid.
    """
    if not specs:
        raise SourceFailed(f"{source} lists no tools")
    if len(specs) > MAX_TOOLS:
        raise SourceFailed(f"{source} lists {len(specs)} tools, the limit is {MAX_TOOLS}")
    names: set[str] = set()
    for spec in specs:
        if not NAME.fullmatch(spec.name):
            allowed = "expected at most 64 letters, digits, _ and -"
            raise SourceFailed(f"{source} has a tool of the name {spec.name!r:.80}; {allowed}")
        if spec.name in names:
            raise SourceFailed(f"{source} has two tools of the name {spec.name}")
        names.add(spec.name)
        if problem := _schema_problem(spec.parameters):
            raise SourceFailed(f"{source}: the schema of tool {spec.name} {problem}")


def _schema_problem(schema: dict[str, Any]) -> str:
    import jsonschema

    if schema.get("type") != "object":
        return f"has type {schema.get('type')!r}, not 'object'"
    if (size := len(msgspec.json.encode(schema))) > MAX_SCHEMA_BYTES:
        return f"has {size} bytes, the limit is {MAX_SCHEMA_BYTES}"
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError as error:
        return f"is not valid: {clean(error.message, 200)}"
    return ""


class ArgumentChecker:
    """Checks the arguments of calls; schemas are compiled once."""

    def __init__(self, specs: Iterable[ToolSpec]) -> None:
        import jsonschema
        import referencing

        # without it, a reference to an address would be fetched
        closed = referencing.Registry()
        self._validators = {
            spec.name: jsonschema.Draft202012Validator(spec.parameters, registry=closed)
            for spec in specs
        }

    def problem(self, tool: str, arguments: dict[str, Any]) -> str:
        """Return what is wrong with a call, for the policy; empty if nothing is."""
        import jsonschema

        validator = self._validators.get(tool)
        if validator is None:
            return f"there is no tool {tool!r:.80}; there are {', '.join(self._validators)}"
        try:
            error = jsonschema.exceptions.best_match(validator.iter_errors(arguments))
        except Exception as failure:  # noqa: BLE001 - a reference that leads nowhere, for example
            return f"the arguments of {tool} cannot be checked: {clean(str(failure), 200)}"
        if error is None:
            return ""
        place = ".".join(map(str, error.absolute_path))
        return f"the arguments of {tool} are not valid{f' at {place}' * bool(place)}: " + clean(
            error.message, 300
        )
