"""``kind: openapi``: the operations of an HTTP API, by its OpenAPI 3 description.

    tools:
      shop: {kind: openapi, args: {document: shop.yaml, url: "http://127.0.0.1:8800"}}

Each operation is a tool named by its ``operationId``. Its arguments are the parameters in path and
query, and ``body`` if it takes JSON. An answer with a status of 400 or more is a result that the
policy reads, except 502, 503 and 504: then the server is to blame, as when there is none.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import aiohttp
import yaml
from pydantic import Field
from yarl import URL

from broker.errors import ConfigError, reason_of
from broker.settings.config import DataPath, Section
from broker.settings.secret import SecretRef
from envhub.envs.tool_sources.base import (
    MAX_MESSAGE_BYTES,
    ServerUrl,
    SlowTool,
    SourceFailed,
    ToolResult,
    ToolSource,
    ToolSpec,
)
from envhub.envs.tool_sources.secret_values import find_values, hide, secrets_of

METHODS: Final = ("get", "post", "put", "patch", "delete")
OUTAGES: Final = (502, 503, 504)
MAX_DEPTH: Final = 32  # of references within references
BODY: Final = "body"
JSON_TYPE: Final = "application/json"


class OpenApiArgs(Section):
    """``args`` of a tool source of kind ``openapi``."""

    document: DataPath  # the description, in JSON or YAML
    url: ServerUrl  # of the server, which the paths follow
    # sent with every request
    headers: dict[str, str | SecretRef] = Field(default_factory=dict)


@dataclass(frozen=True)
class Operation:
    """A method of a path."""

    spec: ToolSpec
    method: str
    path: str
    path_names: tuple[str, ...]
    query_names: tuple[str, ...]


class OpenApiSource(ToolSource):
    """The operations of one server."""

    Args = OpenApiArgs

    args: OpenApiArgs

    def __init__(self, name: str, args: OpenApiArgs) -> None:
        super().__init__(name, args)
        self._session: aiohttp.ClientSession | None = None
        self._operations: dict[str, Operation] = {}
        self._secrets: list[str] = []

    @classmethod
    def check(cls, args: OpenApiArgs) -> None:
        read_operations(args.document)

    @classmethod
    def data_files(cls, args: OpenApiArgs) -> list[str]:
        return [args.document]

    async def open(self) -> Sequence[ToolSpec]:
        headers = find_values(self.args.headers, f"tools.{self.name}.headers", self.args.url)
        self._secrets = secrets_of(self.args.headers, headers)
        operations = read_operations(self.args.document)
        self._operations = {operation.spec.name: operation for operation in operations}
        self._session = aiohttp.ClientSession(headers=headers)
        return [operation.spec for operation in operations]

    async def call(self, tool: str, arguments: dict[str, Any], timeout_s: float) -> ToolResult:
        if self._session is None:
            raise SourceFailed(f"API {self.name} is closed")
        operation = self._operations[tool]
        path = operation.path
        for name in operation.path_names:
            value = _plain(arguments.get(name, ""))
            if value in ("", ".", ".."):
                # it would lead to another path
                return ToolResult(f"{name} must not be {value!r}", is_error=True)
            path = path.replace(f"{{{name}}}", quote(value, safe=""))
        query = [
            (name, _plain(value))
            for name in operation.query_names
            if name in arguments
            for value in _as_list(arguments[name])
        ]
        body = {"json": arguments[BODY]} if BODY in arguments else {}
        url = URL(f"{self.args.url.rstrip('/')}{path}", encoded=True)
        try:
            async with (
                asyncio.timeout(timeout_s) as limit,
                self._session.request(
                    operation.method, url, params=query, allow_redirects=False, **body
                ) as reply,
            ):
                data = await _read_bounded(reply)
        except TimeoutError:
            if not limit.expired():
                raise
            raise SlowTool(f"{tool} did not return within {timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            reason = hide(reason_of(error), self._secrets)
            raise SourceFailed(f"API {self.name} at {self.args.url}: {reason}") from None
        if reply.status in OUTAGES:
            raise SourceFailed(f"API {self.name} at {self.args.url} answered {reply.status}")
        if data is None:
            return ToolResult(f"the answer is larger than {MAX_MESSAGE_BYTES} bytes", is_error=True)
        text = data.decode("utf-8", "replace")
        if reply.status >= 300:
            return ToolResult(f"HTTP {reply.status}: {text}", is_error=True)
        return ToolResult(text)

    async def close(self) -> None:
        session = self._session
        self._session = None
        if session is not None:
            await session.close()


async def _read_bounded(reply: aiohttp.ClientResponse) -> bytes | None:
    """Return the body, None if it is too large."""
    parts = []
    size = 0
    async for part in reply.content.iter_chunked(1 << 16):
        size += len(part)
        if size > MAX_MESSAGE_BYTES:
            reply.close()
            return None
        parts.append(part)
    return b"".join(parts)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def read_operations(document: str) -> list[Operation]:
    """Return the operations of a description.

    Raises:
        ConfigError: if it is none, or an operation cannot be a tool; names it.
    """
    path = Path(document)
    if not path.is_file():
        raise ConfigError("document", document, "there is no such file")
    try:
        description = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        problem = " ".join(str(error).split())
        raise ConfigError("document", document, f"JSON or YAML: {problem:.300}") from None
    if not isinstance(description, dict) or not str(description.get("openapi", "")).startswith("3"):
        raise ConfigError("document", document, "a description with openapi: 3.…")
    operations = []
    try:
        for route, methods in (description.get("paths") or {}).items():
            shared = methods.get("parameters", [])
            for method in METHODS:
                if method in methods:
                    operations.append(
                        _read_operation(description, route, method, shared, methods[method])
                    )
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        allowed = f"an OpenAPI description; {type(error).__name__}: {error}"
        raise ConfigError("document", document, allowed[:300]) from None
    if not operations:
        raise ConfigError("document", document, "a description with at least one operation")
    return operations


def _read_operation(
    description: Any, route: str, method: str, shared: list[Any], operation: Mapping[str, Any]
) -> Operation:
    name = operation.get("operationId") or f"{method}_{route}"
    name = re.sub(r"[^A-Za-z0-9-]+", "_", name).strip("_")[:64]
    properties: dict[str, Any] = {}
    required: list[str] = []
    names: dict[str, list[str]] = {"path": [], "query": []}
    for entry in [*shared, *operation.get("parameters", [])]:
        parameter = _inlined(description, entry)
        if parameter["in"] not in names:
            if parameter.get("required"):
                raise ValueError(
                    f"{name}: parameter {parameter['name']} in {parameter['in']} is required; "
                    "only path, query and body are supported"
                )
            continue
        schema = dict(parameter.get("schema") or {})
        if parameter.get("description"):
            schema["description"] = parameter["description"]
        properties[parameter["name"]] = schema
        names[parameter["in"]].append(parameter["name"])
        if parameter.get("required") or parameter["in"] == "path":
            required.append(parameter["name"])
    if request := _inlined(description, operation.get("requestBody") or {}):
        content = request.get("content") or {}
        if JSON_TYPE not in content:
            raise ValueError(f"{name}: its body is not {JSON_TYPE}")
        if BODY in properties:
            raise ValueError(f"{name}: a parameter has the name {BODY}")
        properties[BODY] = content[JSON_TYPE].get("schema") or {}
        if request.get("required"):
            required.append(BODY)
    about = operation.get("description") or operation.get("summary") or ""
    parameters = {"type": "object", "properties": properties, "additionalProperties": False}
    if required:
        parameters["required"] = list(dict.fromkeys(required))
    spec = ToolSpec(name, about, parameters)
    return Operation(spec, method, route, tuple(names["path"]), tuple(names["query"]))


def _inlined(description: Any, value: Any, depth: int = 0) -> Any:
    """Return a value with the references within the document replaced."""
    if depth > MAX_DEPTH:
        raise ValueError(f"references are nested deeper than {MAX_DEPTH}, or within themselves")
    if isinstance(value, list):
        return [_inlined(description, item, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    reference = value.get("$ref")
    if reference is None:
        return {key: _inlined(description, item, depth + 1) for key, item in value.items()}
    if not str(reference).startswith("#/"):
        raise ValueError(f"reference {reference} leads out of the document")
    target = description
    for part in reference[2:].split("/"):
        target = target[part.replace("~1", "/").replace("~0", "~")]
    return _inlined(description, target, depth + 1)
