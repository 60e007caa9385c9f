"""Converts requested answer formats and tool choices to guides, and checks that they compile."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, Final

from broker.contract import wire
from broker.contract.checks import MAX_GUIDE_CHARS
from rlearner_text.guided_decoding import GuideCompiler, GuideError
from rlearner_text.openai import tool_calls
from rlearner_text.openai.http_errors import HttpError
from rlearner_text.openai.request_bodies import ChatBody
from rlearner_text.tokenizer import Tokenizer
from rlearner_text.tool_calls import ToolSyntax

_BY_NAME: Final = {"properties", "$defs", "definitions"}  # schemas by name
_LISTED: Final = {"items", "prefixItems", "anyOf", "oneOf", "additionalProperties"}
# Next to one of these, ``properties`` is not the whole schema.
_OPEN: Final = {"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"}


def guides_of(body: ChatBody, tokenizer: Tokenizer) -> list[wire.Guide]:
    """Return the guides that the answer to a chat must follow; empty if it is free.

    A required call is exactly one call. With a ``response_format`` the answer is JSON of that
    format or, if tools are offered, one call.

    Raises:
        HttpError: 400 if the guides cannot be compiled to a grammar, or the chat template has no
            tool calls.
    """
    param = "tools" if body.forced else "response_format"
    try:
        guides = _build_guides(body, tokenizer)
    except RecursionError:
        raise HttpError(400, f"{param}: its schema is nested too deeply", param=param) from None
    if guides:
        if (
            size := sum(
                len(guide.schema) + len(guide.before) + len(guide.after) for guide in guides
            )
        ) > MAX_GUIDE_CHARS:
            raise HttpError(
                400,
                f"{param}: schemas of {size} characters are not allowed; at most {MAX_GUIDE_CHARS}",
                param=param,
            )
        try:
            _compiler_for(tokenizer).check(guides)
        except GuideError as error:
            raise HttpError(
                400, f"{param}: its schema cannot be compiled to a grammar: {error}", param=param
            ) from None
    return guides


def _build_guides(body: ChatBody, tokenizer: Tokenizer) -> list[wire.Guide]:
    if body.forced:
        return _call_guides(body, tokenizer)
    if (schema := body.response_format.wanted) is None:
        return []
    return [
        wire.Guide(schema=json.dumps(close_objects(schema))),
        *(_call_guides(body, tokenizer) if body.offered else []),
    ]


def close_objects(schema: Any) -> Any:
    """Return a schema whose objects have no other properties, unless it allows them explicitly.

    JSON Schema allows additional properties by default, and a policy that has not learned to end an
    object would keep adding them.
    """
    if not isinstance(schema, dict):
        return schema
    closed = dict(schema)
    for key in _BY_NAME & schema.keys():
        if isinstance(schema[key], dict):
            closed[key] = {
                name: close_objects(subschema) for name, subschema in schema[key].items()
            }
    for key in _LISTED & schema.keys():
        inner = schema[key]
        closed[key] = (
            [close_objects(subschema) for subschema in inner]
            if isinstance(inner, list)
            else close_objects(inner)
        )
    if "properties" in schema and not _OPEN & schema.keys():
        closed["additionalProperties"] = False
    return closed


@lru_cache(maxsize=8)
def _compiler_for(tokenizer: Tokenizer) -> GuideCompiler:
    return GuideCompiler(tokenizer)


def _call_guides(body: ChatBody, tokenizer: Tokenizer) -> list[wire.Guide]:
    """Return guides for one call of any callable tool."""
    syntax = tool_calls.tool_syntax(tokenizer)
    return [_call_schema(tool["function"], syntax) for tool in body.callable_tools]


def _call_schema(function: dict[str, Any], syntax: ToolSyntax) -> wire.Guide:
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    properties = {syntax.name_key: {"const": function["name"]}, syntax.arguments_key: parameters}
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    # $ref starts at the root
    lifted = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    return wire.Guide(
        schema=json.dumps(close_objects(schema | lifted)), before=syntax.before, after=syntax.after
    )
