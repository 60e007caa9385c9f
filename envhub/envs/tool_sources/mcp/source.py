"""``kind: mcp``: the tools of an MCP server, a program (stdio) or an address (streamable HTTP)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Annotated, Any, Final, Self

import msgspec
from pydantic import Field, model_validator

from broker.errors import ConfigError, NotInstalled, UserError, reason_of
from broker.settings.config import Section
from broker.settings.secret import SecretRef
from envhub.envs.tool_sources.base import (
    FAREWELL_S,
    MAX_MESSAGE_BYTES,
    ServerUrl,
    SlowTool,
    SourceFailed,
    ToolResult,
    ToolSource,
    ToolSpec,
)
from envhub.envs.tool_sources.process import GuardedProcess
from envhub.envs.tool_sources.schemas import MAX_TOOLS
from envhub.envs.tool_sources.secret_values import find_values, hide, secrets_of
from rlearner_workers.environment import worker_environment

log = logging.getLogger(__name__)

# for a server that let a call time out to answer anything
PULSE_S: Final = 2.0
NOT_HERE: Final = "kind mcp needs the package mcp: pip install 'rlearner[tools]'"


class McpArgs(Section):
    """``args`` of a tool source of kind ``mcp``."""

    # program and arguments of a server over stdio; or:
    command: list[str] = Field(default_factory=list)
    url: ServerUrl | None = None  # of a server over streamable HTTP
    # added to the program's environment
    env: dict[str, str | SecretRef] = Field(default_factory=dict)
    cwd: str | None = None  # folder that the program runs in; null: the hub's
    # sent with every request to url
    headers: dict[str, str | SecretRef] = Field(default_factory=dict)
    # for the server to start and to list its tools
    start_timeout_s: Annotated[float, Field(gt=0)] = 20.0

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if bool(self.command) == bool(self.url):
            raise ValueError("give one of command and url")
        if self.url and (self.env or self.cwd):
            raise ValueError("env and cwd need command")
        if self.command and self.headers:
            raise ValueError("headers need url")
        return self


class McpSource(ToolSource):
    """One session with a server."""

    Args = McpArgs

    args: McpArgs

    def __init__(self, name: str, args: McpArgs) -> None:
        super().__init__(name, args)
        self._client: Any = None
        self._process: GuardedProcess | None = None
        self._session: asyncio.Task[None] | None = None
        self._ends = asyncio.Event()
        self._secrets: list[str] = []
        self._digest = b""
        self._has_changed = False

    @classmethod
    def check(cls, args: McpArgs) -> None:
        try:
            import mcp.client  # noqa: F401
        except ImportError:
            raise NotInstalled(NOT_HERE) from None
        if args.command:
            path = _plain(args.env).get("PATH") or worker_environment().get("PATH")
            if shutil.which(args.command[0], path=path) is None:
                allowed = f"a program that is there; {args.command[0]!r} is not"
                raise ConfigError("command", args.command, allowed)

    async def open(self) -> Sequence[ToolSpec]:
        started: asyncio.Future[Sequence[ToolSpec]] = asyncio.get_running_loop().create_future()
        # one task enters and leaves the session, as the package demands
        self._session = asyncio.create_task(self._serve(started))
        try:
            return await asyncio.shield(started)
        except BaseException:
            if not started.done():
                started.cancel()
            await self.close()
            raise

    async def call(self, tool: str, arguments: dict[str, Any], timeout_s: float) -> ToolResult:
        from mcp.shared.exceptions import MCPError
        from mcp_types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        if self._client is None:
            raise SourceFailed(f"tool server {self.name} is not running")
        if self._has_changed:
            await self._check_list()
        try:
            async with asyncio.timeout(timeout_s) as limit:
                result = await self._client.call_tool(tool, arguments)
        except TimeoutError:
            if not limit.expired():
                raise
            late = f"{tool} did not return within {timeout_s:g} s"
            if await self._has_pulse():
                raise SlowTool(late) from None
            detail = f"{late}, nor a list of its tools within {PULSE_S:g} s"
            raise SourceFailed(f"tool server {self.name} hangs: {detail}") from None
        except MCPError as error:
            if error.code in (CONNECTION_CLOSED, REQUEST_TIMEOUT):
                # over HTTP each answer has a stream of its own
                if self.args.url and await self._has_pulse():
                    text = f"the answer broke off, or is larger than {MAX_MESSAGE_BYTES} bytes"
                    return ToolResult(text, is_error=True)
                raise SourceFailed(await self._describe_death(error)) from None
            # an unknown tool, wrong arguments, or what the tool itself reports
            return ToolResult(hide(error.message, self._secrets), is_error=True)
        except Exception as error:  # noqa: BLE001 - the package and the server may do anything
            raise SourceFailed(await self._describe_death(error)) from None
        return ToolResult(self._text_of(result), is_error=bool(result.is_error))

    async def close(self) -> None:
        session = self._session
        self._session = None
        self._client = None
        self._ends.set()
        if session is None:
            return
        _, pending = await asyncio.wait({session}, timeout=2 * FAREWELL_S)
        if pending:
            session.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await session

    async def _serve(self, started: asyncio.Future[Sequence[ToolSpec]]) -> None:
        """Hold the session from start to end."""
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(self.args.start_timeout_s) as limit:
                    self._client = await self._connect(stack)
                    specs = await self._list()
                self._digest = _digest_of(specs)
                if not started.done():
                    started.set_result(specs)
                await self._ends.wait()
        except BaseException as error:
            if started.done():
                if isinstance(error, asyncio.CancelledError):
                    raise
                log.debug("tool server %s: %s", self.name, reason_of(error))
                return
            if isinstance(error, UserError | SourceFailed):
                started.set_exception(error)
            elif isinstance(error, TimeoutError) and limit.expired():
                limit_s = self.args.start_timeout_s
                detail = f"tool server {self.name} did not list its tools within {limit_s:g} s"
                started.set_exception(SourceFailed(detail))
            else:
                started.set_exception(SourceFailed(await self._describe_death(error)))
        finally:
            self._client = None

    async def _connect(self, stack: AsyncExitStack) -> Any:
        from mcp.client import Client
        from mcp.client.streamable_http import streamable_http_client

        from envhub.envs.tool_sources.mcp.http import make_client
        from envhub.envs.tool_sources.mcp.stdio import stdio_transport

        if self.args.url:
            headers = find_values(self.args.headers, f"tools.{self.name}.headers", self.args.url)
            self._secrets = secrets_of(self.args.headers, headers)
            http_client = await stack.enter_async_context(make_client(headers))
            transport: Any = streamable_http_client(
                self.args.url, http_client=http_client, max_sse_event_size=MAX_MESSAGE_BYTES
            )
        else:
            env = find_values(self.args.env, f"tools.{self.name}.env")
            self._secrets = secrets_of(self.args.env, env)
            self._process = await GuardedProcess.start(
                self.args.command, {**worker_environment(), **env}, self.args.cwd
            )
            stack.push_async_callback(self._process.close)
            transport = stdio_transport(self._process)
        client = Client(transport, cache=None, message_handler=self._on_message)
        return await stack.enter_async_context(client)

    async def _on_message(self, message: Any) -> None:
        from mcp_types import ToolListChangedNotification

        if isinstance(getattr(message, "root", message), ToolListChangedNotification):
            self._has_changed = True

    async def _list(self) -> list[ToolSpec]:
        specs: list[ToolSpec] = []
        cursor = None
        while True:
            page = await self._client.list_tools(cursor=cursor)
            specs += [
                ToolSpec(tool.name, tool.description or "", tool.input_schema)
                for tool in page.tools
            ]
            cursor = page.next_cursor
            # a list without end is reported with the number of its tools
            if not cursor or len(specs) > MAX_TOOLS:
                return specs

    async def _check_list(self) -> None:
        """Compare a list that the server calls changed with the one that the policy was shown."""
        self._has_changed = False
        try:
            async with asyncio.timeout(self.args.start_timeout_s):
                specs = await self._list()
        except Exception as error:  # noqa: BLE001 - as for calls
            raise SourceFailed(await self._describe_death(error)) from None
        if _digest_of(specs) != self._digest:
            raise SourceFailed(
                f"tool server {self.name} changed its tools during an episode; it lists "
                f"{', '.join(spec.name for spec in specs) or 'none'} now"
            )

    async def _has_pulse(self) -> bool:
        """Tell a tool that is slow from a server that hangs: whether it still answers."""
        try:
            async with asyncio.timeout(PULSE_S):
                await self._client.list_tools()
        except Exception:  # noqa: BLE001 - as for calls
            return False
        return True

    async def _describe_death(self, error: BaseException) -> str:
        """Return what became of the server, in one line without its secrets."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if self._process is not None:
            text = await self._process.describe_end()
            if "closed its output" in text:
                text = f"{text} ({hide(reason_of(error), self._secrets)})"
        else:
            text = f"at {self.args.url} failed: {reason_of(error)}"
        return f"tool server {self.name} {hide(text, self._secrets)}"

    def _text_of(self, result: Any) -> str:
        texts = [_text_of_block(block) for block in result.content]
        if not texts and result.structured_content is not None:
            texts = [msgspec.json.encode(result.structured_content).decode()]
        return "\n".join(texts)


def _text_of_block(block: Any) -> str:
    match block.type:
        case "text":
            return str(block.text)
        case "image" | "audio":
            return f"({block.type} of type {block.mime_type}, not shown)"
        case "resource_link":
            return f"{block.name}: {block.uri}"
        case _:
            resource = block.resource
            return str(getattr(resource, "text", f"({resource.uri}, not a text)"))


def _digest_of(specs: Sequence[ToolSpec]) -> bytes:
    ordered = sorted(specs, key=lambda spec: spec.name)
    return msgspec.json.encode(ordered, order="deterministic")


def _plain(values: dict[str, str | SecretRef]) -> dict[str, str]:
    return {name: value for name, value in values.items() if isinstance(value, str)}
