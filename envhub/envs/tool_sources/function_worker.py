"""Runs Python functions for ``functions``: the first request lists them, each further one calls."""

from __future__ import annotations

import asyncio
import inspect
import json
import socket
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pydantic

from broker.errors import UserError
from broker.settings.registry import resolve
from broker.system.fault import told
from envhub.envs.tool_sources.base import MAX_MESSAGE_BYTES, ToolResult, ToolSpec, cut
from envhub.envs.tool_sources.function_messages import (
    REQUESTS,
    CallFunction,
    FunctionList,
    FunctionReply,
)
from rlearner_workers.frames import read_frame, write_frame


class ToolFunction:
    """A function with a schema.

    Raises:
        UserError: if it cannot be described to a policy.
    """

    def __init__(self, target: str) -> None:
        self.function: Callable[..., Any] = resolve("functions", target, {})
        if not callable(self.function):
            raise UserError(f"{target} is no function but {type(self.function).__name__}")
        name = target.rpartition(":")[2].rpartition(".")[2]
        fields: dict[str, Any] = {}
        for parameter in inspect.signature(self.function, eval_str=True).parameters.values():
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
                raise UserError(f"{target} has the parameter {parameter}, which has no name")
            if parameter.kind is parameter.VAR_KEYWORD or parameter.annotation is parameter.empty:
                raise UserError(f"{target}: annotate the type of parameter {parameter.name}")
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[parameter.name] = (parameter.annotation, default)
        config = pydantic.ConfigDict(extra="forbid")
        self.model = pydantic.create_model(name, __config__=config, **fields)
        schema = self.model.model_json_schema()
        schema.pop("title", None)
        for value in schema.get("properties", {}).values():
            value.pop("title", None)
        self.spec = ToolSpec(name, inspect.getdoc(self.function) or "", schema)

    def call(self, arguments: dict[str, Any]) -> ToolResult:
        """Run it; what it raises is the result."""
        try:
            values = self.model.model_validate(arguments)
            result = self.function(**{name: getattr(values, name) for name in arguments})
            if inspect.isawaitable(result):
                result = asyncio.run(_await_result(result))
            text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
        except BaseException as error:  # noqa: BLE001 - users' code may raise anything
            return ToolResult(told(error), is_error=True)
        # far above any limit of what is shown
        return ToolResult(cut(text.encode("utf-8", "replace").decode(), MAX_MESSAGE_BYTES // 8))


async def _await_result(work: Any) -> Any:
    return await work


def serve(connection: socket.socket, targets: list[str]) -> None:
    """Answer until the hub closes the connection."""
    with connection:
        fd = connection.fileno()
        read_frame(fd)
        functions: dict[str, ToolFunction] = {}
        try:
            for target in targets:
                function = ToolFunction(target)
                if function.spec.name in functions:
                    raise UserError(f"{target}: there is another {function.spec.name}")
                functions[function.spec.name] = function
        except BaseException as error:  # noqa: BLE001 - importing runs users' code
            problem = str(error) if isinstance(error, UserError) else told(error)
            _reply(fd, FunctionReply(FunctionList(problem=problem)))
            return
        _reply(fd, FunctionReply(FunctionList([each.spec for each in functions.values()])))
        while (data := read_frame(fd)) is not None:
            call = REQUESTS.decode(data)
            assert isinstance(call, CallFunction), "the functions are listed once"
            result = functions[call.name].call(call.arguments)
            if not _reply(fd, FunctionReply(result=result)):
                return


def _reply(fd: int, reply: FunctionReply) -> bool:
    return write_frame(fd, msgspec.msgpack.encode(reply))


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
