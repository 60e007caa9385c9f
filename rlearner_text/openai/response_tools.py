"""Converts the tools of /v1/responses to those of a chat, and the names of calls back (pure).

A namespace is a group of functions. A chat template knows none, so its functions are offered as
``namespace.name``; a call of one is sent, and sent back, as its name and ``namespace``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from rlearner_text.openai.http_errors import HttpError
from rlearner_text.openai.request_bodies import MOST_TOOLS, StrictModel, Word, validate_part

log = logging.getLogger(__name__)

# Tools that OpenAI's servers run and a client can do without, by the beginning of their types.
_SERVER_TOOLS: Final = ("web_search",)


class FunctionTool(StrictModel):
    """A function that the model may call."""

    type: Literal["function"]
    name: Word
    description: str | None = None
    parameters: dict[str, Any] | None = None


class NamespaceTool(StrictModel):
    """A group of functions."""

    type: Literal["namespace"]
    name: Word
    tools: Annotated[list[dict[str, Any]], Field(max_length=MOST_TOOLS)]


def chat_tools(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert tools to a chat's form, without fields that chat templates do not use.

    Raises:
        HttpError: 400 if a type or a field is not allowed; names it.
    """
    functions: list[dict[str, Any]] = []
    for number, tool in enumerate(tools):
        place = f"tools.{number}"
        kind = tool.get("type")
        if isinstance(kind, str) and kind.startswith(_SERVER_TOOLS):
            note_dropped(kind)
        elif kind == "namespace":
            group = validate_part(NamespaceTool, tool, place)
            functions += [
                _chat_tool(function, f"{place}.tools.{index}", namespace=group.name)
                for index, function in enumerate(group.tools)
            ]
        else:
            functions.append(_chat_tool(tool, place))
    return functions


def namespaces_of(tools: Sequence[dict[str, Any]]) -> dict[str, tuple[str, str]]:
    """Return namespace and name of each function in a namespace, by the name a chat offers."""
    return {
        offered_name(str(function["name"]), str(tool["name"])): (tool["name"], function["name"])
        for tool in tools
        if tool.get("type") == "namespace"
        for function in tool["tools"]
    }


def offered_name(name: str, namespace: str | None) -> str:
    """Return the name under which a chat offers a function."""
    if not namespace:
        return name
    return f"{namespace}.{name}"


def call_names(name: str, namespaces: Mapping[str, tuple[str, str]]) -> dict[str, str]:
    """Return the fields that name the function of a call."""
    if name not in namespaces:
        return {"name": name}
    namespace, own_name = namespaces[name]
    return {"name": own_name, "namespace": namespace}


@lru_cache(maxsize=64)
def note_dropped(kind: str) -> None:
    """Log, once in a process, that tools of a type are not offered to the policy."""
    log.warning("tools of type %s run at the provider of a model; none is offered here", kind[:100])


def _chat_tool(tool: dict[str, Any], place: str, *, namespace: str = "") -> dict[str, Any]:
    if tool.get("type") != "function":
        raise HttpError(
            400,
            f"{place}.type: {tool.get('type')!r} is not allowed; only tools of type "
            "'function' and 'namespace' are supported",
            param=f"{place}.type",
            code="unsupported_parameter",
        )
    function_tool = validate_part(FunctionTool, tool, place)
    function: dict[str, Any] = {"name": offered_name(function_tool.name, namespace)}
    if function_tool.description is not None:
        function["description"] = function_tool.description
    function["parameters"] = function_tool.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}
