"""Sources of tools: Python functions, OpenAPI descriptions, MCP servers of the package itself over
both transports, and what is left when a hub is killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tool_kit import RAW_SERVER, is_alive

from broker.errors import ConfigError, UserError
from envhub.envs.tool_sources.base import SlowTool, SourceFailed, ToolResult
from envhub.envs.tool_sources.functions import FunctionArgs, FunctionSource
from envhub.envs.tool_sources.openapi import OpenApiArgs, OpenApiSource, read_operations
from envhub.envs.tool_sources.process import GUARD

PATIENCE_S = 60.0

FUNCTIONS = '''
import asyncio, os, time
from typing import Literal

def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b

async def greet(name: str, tone: Literal["kind", "loud"] = "kind") -> str:
    await asyncio.sleep(0)
    return name.upper() if tone == "loud" else name

def fail(word: str) -> str:
    raise KeyError(word)

def hang() -> None:
    time.sleep(600)

def leave() -> None:
    os._exit(3)

def secret() -> str:
    return os.environ["FUNCTION_KEY"]

def broken(a) -> int:
    return a

def sized(count: int) -> str:
    return "x" * count

number = 3
'''


@pytest.fixture
def functions_file(tmp_path: Path) -> str:
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS, encoding="utf-8")
    return str(path)


def function_source(file: str, *names: str, **args: Any) -> FunctionSource:
    targets = [f"{file}:{name}" for name in names]
    return FunctionSource("f", FunctionArgs(functions=targets, **args))


async def test_functions_are_described_and_called(functions_file: str) -> None:
    source = function_source(functions_file, "add", "greet", "fail", "sized")
    try:
        add, greet, *_ = await source.open()
        assert (add.name, add.description) == ("add", "Add two numbers.")
        assert add.parameters["required"] == ["a"]
        assert add.parameters["properties"]["b"] == {"default": 1, "type": "integer"}
        assert greet.parameters["properties"]["tone"]["enum"] == ["kind", "loud"]
        assert await source.call("add", {"a": 2}, 30.0) == ToolResult("3")
        loud = {"name": "ann", "tone": "loud"}
        assert await source.call("greet", loud, 30.0) == ToolResult("ANN")
        failed = await source.call("fail", {"word": "x"}, 30.0)
        assert failed.is_error
        assert "KeyError: 'x'" in failed.text
        assert len((await source.call("sized", {"count": 9 << 20}, 30.0)).text) < 2 << 20
    finally:
        await source.close()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("hang", "function hang did not return within 0.5 s"),
        ("leave", "function leave ended its process"),
    ],
)
async def test_a_function_that_does_not_return_ends_with_its_process(
    functions_file: str, name: str, expected: str
) -> None:
    source = function_source(functions_file, name)
    await source.open()
    pid = source._pid
    with pytest.raises(SourceFailed, match=expected):
        await source.call(name, {}, 0.5 if name == "hang" else PATIENCE_S)
    wait_for_end(pid)
    with pytest.raises(SourceFailed, match="not running"):
        await source.call(name, {}, 1.0)


def wait_for_end(*pids: int) -> None:
    until = time.monotonic() + PATIENCE_S
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < until, f"{pids} outlive their owner"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("broken", "annotate the type of parameter a"),
        ("number", "is no function but int"),
        ("gone", "gone"),
    ],
)
async def test_what_is_no_tool_is_refused_in_one_line(
    functions_file: str, name: str, expected: str
) -> None:
    source = function_source(functions_file, name)
    with pytest.raises(SourceFailed, match=expected) as caught:
        await source.open()
    assert "\n" not in str(caught.value)


async def test_secrets_of_functions_come_from_the_environment(
    functions_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = function_source(functions_file, "secret", env={"FUNCTION_KEY": {"env": "SOME_SECRET"}})
    with pytest.raises(
        UserError, match=r"tools\.f\.env\.FUNCTION_KEY needs the environment variable"
    ):
        await source.open()
    monkeypatch.setenv("SOME_SECRET", "swordfish-77")
    try:
        await source.open()
        assert "swordfish" not in command_line(source._pid)
        assert (await source.call("secret", {}, 30.0)).text == "swordfish-77"
    finally:
        await source.close()


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8")


# -- OpenAPI

DESCRIPTION = {
    "openapi": "3.1.0",
    "paths": {
        "/items/{item}": {
            "parameters": [{"$ref": "#/components/parameters/Item"}],
            "get": {"operationId": "get_item", "summary": "Look at an item."},
            "put": {
                "operationId": "put_item",
                "parameters": [{"name": "note", "in": "query", "schema": {"type": "string"}}],
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/I"}}},
                },
            },
        },
        "/slow": {"get": {}},
    },
    "components": {
        "parameters": {
            "Item": {"name": "item", "in": "path", "required": True, "schema": {"type": "string"}}
        },
        "schemas": {"I": {"type": "object", "properties": {"price": {"type": "number"}}}},
    },
}


@pytest.fixture
def description_file(tmp_path: Path) -> str:
    path = tmp_path / "shop.json"
    path.write_text(json.dumps(DESCRIPTION), encoding="utf-8")
    return str(path)


@pytest.fixture
async def shop() -> AsyncIterator[TestServer]:
    async def item(request: web.Request) -> web.Response:
        name = request.match_info["item"]
        if name == "gone":
            return web.Response(status=404, text="no such item")
        if name == "down":
            return web.Response(status=503)
        if name == "large":
            return web.Response(body=b"x" * (9 << 20))
        body = await request.json() if request.method == "PUT" else None
        answer = [name, dict(request.query), body, request.headers.get("X-Key")]
        return web.json_response(answer)

    async def slow(request: web.Request) -> web.Response:
        await asyncio.sleep(PATIENCE_S)
        return web.Response()

    app = web.Application()
    app.router.add_route("*", "/api/items/{item}", item)
    app.router.add_get("/api/slow", slow)
    async with TestServer(app) as server:
        yield server


@pytest.fixture
async def api(
    shop: TestServer, description_file: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[OpenApiSource]:
    monkeypatch.setenv("SHOP_SECRET", "swordfish-77")
    args = {
        "document": description_file,
        "url": str(shop.make_url("/api")),
        "headers": {"X-Key": {"env": "SHOP_SECRET"}},
    }
    source = OpenApiSource("shop", OpenApiArgs.model_validate(args))
    await source.open()
    yield source
    await source.close()


def test_operations_become_tools(description_file: str) -> None:
    get_item, put_item, slow = (each.spec for each in read_operations(description_file))
    assert (get_item.name, get_item.description) == ("get_item", "Look at an item.")
    assert get_item.parameters["required"] == ["item"]
    assert put_item.parameters["properties"]["body"]["properties"] == {"price": {"type": "number"}}
    assert put_item.parameters["required"] == ["item", "body"]
    assert slow.name == "get_slow"


async def test_operations_are_called(api: OpenApiSource) -> None:
    arguments = {"item": "a/b?c", "note": "x y", "body": {"price": 1.5}}
    result = await api.call("put_item", arguments, 30.0)
    assert json.loads(result.text) == ["a/b?c", {"note": "x y"}, {"price": 1.5}, "swordfish-77"]
    missing = await api.call("get_item", {"item": "gone"}, 30.0)
    assert missing == ToolResult("HTTP 404: no such item", is_error=True)
    large = await api.call("get_item", {"item": "large"}, 30.0)
    assert large == ToolResult(f"the answer is larger than {8 << 20} bytes", is_error=True)
    above = await api.call("get_item", {"item": ".."}, 30.0)
    assert above == ToolResult("item must not be '..'", is_error=True)


async def test_an_outage_is_not_the_policys_fault(api: OpenApiSource, shop: TestServer) -> None:
    with pytest.raises(SourceFailed, match="answered 503"):
        await api.call("get_item", {"item": "down"}, 30.0)
    with pytest.raises(SlowTool):
        await api.call("get_slow", {}, 0.2)
    await shop.close()
    with pytest.raises(SourceFailed, match="API shop at http"):
        await api.call("get_item", {"item": "x"}, 30.0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[", "JSON or YAML"),
        ("swagger: '2.0'", "openapi: 3"),
        ("openapi: 3.1.0", "at least one operation"),
        ("openapi: 3.1.0\npaths: {/a: {get: {parameters: [{in: path}]}}}", "KeyError: 'name'"),
        (
            "openapi: 3.1.0\npaths: {/a: {get: {requestBody: {$ref: 'http://x/y'}}}}",
            "leads out of the document",
        ),
        (
            "openapi: 3.1.0\ncomponents: {r: {$ref: '#/components/r'}}\n"
            "paths: {/a: {get: {requestBody: {$ref: '#/components/r'}}}}",
            "nested deeper",
        ),
        (
            "openapi: 3.1.0\npaths: {/a: {post: {requestBody: {content: {text/plain: {}}}}}}",
            "is not application/json",
        ),
    ],
)
def test_bad_descriptions_are_refused(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "d.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_operations(str(path))
    assert caught.value.key == "document"
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


# -- MCP, by servers of the package

PACKAGE_SERVER = """
import sys
from mcp.server.mcpserver import MCPServer, Context

server = MCPServer("shop")

@server.tool()
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b

@server.tool()
def fail() -> str:
    raise ValueError("no such thing")

@server.tool()
def large() -> str:
    return "x" * (9 << 20)

@server.tool()
async def slow() -> str:
    import anyio
    await anyio.sleep(60)
    return "late"

@server.tool()
def header(ctx: Context) -> str:
    return ctx.request_context.request.headers.get("x-key", "none")

if sys.argv[1:]:
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
else:
    server.run("stdio")
"""


@pytest.fixture
def package_server(tmp_path: Path) -> str:
    pytest.importorskip("mcp.client", reason="needs rlearner[tools]")
    path = tmp_path / "package_server.py"
    path.write_text(PACKAGE_SERVER, encoding="utf-8")
    return str(path)


async def test_a_server_of_the_package_over_stdio(package_server: str) -> None:
    from envhub.envs.tool_sources.mcp.source import McpArgs, McpSource

    args = McpArgs(command=[sys.executable, package_server], start_timeout_s=PATIENCE_S)
    source = McpSource("shop", args)
    try:
        specs = await source.open()
        assert [spec.name for spec in specs] == ["add", "fail", "large", "slow", "header"]
        assert specs[0].description == "Add two numbers."
        assert await source.call("add", {"a": 2, "b": 3}, 30.0) == ToolResult("5")
        failed = await source.call("fail", {}, 30.0)
        assert failed.is_error
        assert "fail" in failed.text
        with pytest.raises(SlowTool, match=r"slow did not return within 0\.3 s"):
            await source.call("slow", {}, 0.3)
        assert await source.call("add", {"a": 1, "b": 1}, 30.0) == ToolResult("2")
    finally:
        await source.close()


@pytest.fixture
def http_server(package_server: str, free_tcp_port: int) -> Iterator[str]:
    command = [sys.executable, package_server, str(free_tcp_port)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        for line in child.stderr:
            if "running on" in line:
                break
        try:
            yield f"http://127.0.0.1:{free_tcp_port}/mcp"
        finally:
            child.kill()


@pytest.fixture
def free_tcp_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


async def test_a_server_of_the_package_over_http(
    http_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from envhub.envs.tool_sources.mcp.source import McpArgs, McpSource

    monkeypatch.setenv("SHOP_SECRET", "swordfish-77")
    headers = {"X-Key": {"env": "SHOP_SECRET"}}
    args = McpArgs.model_validate({"url": http_server, "headers": headers})
    source = McpSource("shop", args)
    try:
        await source.open()
        assert await source.call("add", {"a": 2, "b": 3}, 30.0) == ToolResult("5")
        assert await source.call("header", {}, 30.0) == ToolResult("swordfish-77")
        large = await source.call("large", {}, 30.0)
        assert large.is_error
        assert str(8 << 20) in large.text
        assert await source.call("add", {"a": 1, "b": 1}, 30.0) == ToolResult("2")
    finally:
        await source.close()


# -- what a killed hub leaves

HUB = """
import asyncio, os, sys
from envhub.envs.tool_sources.process import GuardedProcess

async def main():
    process = await GuardedProcess.start(sys.argv[1:], dict(os.environ), None)
    await process.reader.readline()
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_kill_9_of_the_owner_leaves_neither_server_nor_daemon(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    command = [sys.executable, RAW_SERVER, "noise", str(pids)]
    with subprocess.Popen(
        [sys.executable, "-c", HUB, *command], stdout=subprocess.PIPE, env=dict(os.environ)
    ) as hub:
        assert hub.stdout is not None
        assert hub.stdout.readline() == b"ready\n"
        server, daemon = map(int, pids.read_text(encoding="ascii").split())
        assert is_alive(server)
        assert is_alive(daemon)
        hub.send_signal(signal.SIGKILL)
    wait_for_end(server, daemon)


def test_the_guard_reports_how_the_command_ended() -> None:
    for script, status in (("exit 3", 3), ("kill -9 $$", 128 + 9)):
        command = [sys.executable, "-I", "-S", GUARD, str(os.getpid()), "sh", "-c", script]
        assert subprocess.run(command).returncode == status
    missing = [sys.executable, "-I", "-S", GUARD, str(os.getpid()), "/no/such/program"]
    ended = subprocess.run(missing, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (
        127,
        "cannot start /no/such/program: No such file or directory\n",
    )


def test_a_guard_whose_owner_is_gone_starts_nothing(tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    command = [sys.executable, "-I", "-S", GUARD, "1", "touch", str(proof)]
    assert subprocess.run(command).returncode == 1
    assert not proof.exists()
