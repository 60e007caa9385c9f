"""Answers the requests of ``sandboxhub``."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import ssl
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from rlearner_sandbox.hub import wire
from rlearner_sandbox.hub.sessions import HubFull, Sessions
from rlearner_sandbox.providers import archive
from rlearner_sandbox.providers.base import (
    EpisodeSandbox,
    SandboxError,
    SandboxProvider,
    SandboxSpec,
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
REAP_S: Final = 5.0
_PIECE: Final = 1 << 16


class HubServer:
    """Sandboxes of a provider over HTTP.

    Args:
        token: what each request has to bring.
        most: sandboxes at once.
        image_folders: folders below which clients may name images; digests are always allowed.
        host_network: whether clients may start sandboxes in the host's network.
    """

    def __init__(
        self,
        provider: SandboxProvider,
        *,
        token: str,
        most: int,
        image_folders: tuple[Path, ...] = (),
        host_network: bool = False,
        session_s: float = wire.SESSION_S,
    ) -> None:
        self._provider = provider
        self._token = token
        self._most = most
        self._image_folders = image_folders
        self._host_network = host_network
        self.sessions = Sessions(provider, most, session_s=session_s)
        self._runner: web.AppRunner | None = None
        self._reaping: asyncio.Task[None] | None = None

    async def start(self, address: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Listen, and return the port."""
        app = web.Application(middlewares=[self._guard], client_max_size=wire.MAX_REQUEST)
        app.add_routes(
            [
                web.get("/health", self._answer_health),
                web.post("/v1/session", self._answer_ping),
                web.delete("/v1/session", self._end_session),
                web.post("/v1/sandboxes", self._start_sandbox),
                web.delete("/v1/sandboxes/{id}", self._stop_sandbox),
                web.post("/v1/sandboxes/{id}/commands", self._run_command),
                web.put("/v1/sandboxes/{id}/files", self._upload),
                web.get("/v1/sandboxes/{id}/files", self._download),
                web.post("/v1/sandboxes/{id}/snapshot", self._snapshot),
                web.post("/v1/sandboxes/{id}/fork", self._fork),
                web.post("/v1/sandboxes/{id}/reset", self._reset),
            ]
        )
        # A client that goes away ends its command.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, address, port, ssl_context=tls)
        await site.start()
        self._reaping = asyncio.ensure_future(self._reap_sessions())
        return int(self._runner.addresses[0][1])

    async def _reap_sessions(self) -> None:
        while True:
            await asyncio.sleep(REAP_S)
            await self.sessions.end_silent()

    async def close(self) -> None:
        """Stop listening and every sandbox."""
        if self._reaping is not None:
            self._reaping.cancel()
        if self._runner is not None:
            await self._runner.cleanup()
        await self._provider.close()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path != "/health":
            token = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(token.encode(), self._token.encode()):
                return _refuse(401, "token", "the token is not the one of this hub")
            if len(request.headers.get(wire.SESSION_HEADER, "")) < 16:
                return _refuse(422, "value", f"the header {wire.SESSION_HEADER} is missing")
            self.sessions.note_sign(self._session(request))
        try:
            return await handler(request)
        except KeyError:
            return _refuse(410, "gone", "there is no such sandbox on this hub")
        except FileNotFoundError as error:
            return _refuse(404, "missing", str(error))
        except ValueError as error:
            return _refuse(422, "value", str(error))
        except HubFull as error:
            return _refuse(503, "full", str(error))
        except SandboxError as error:
            return _refuse(502, "failed", str(error))

    def _session(self, request: web.Request) -> str:
        return request.headers[wire.SESSION_HEADER]

    def _sandbox(self, request: web.Request) -> EpisodeSandbox:
        return self.sessions.find(self._session(request), request.match_info["id"])

    async def _answer_health(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"ok": True})

    async def _answer_ping(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"sandboxes": len(self.sessions), "most": self._most})

    async def _end_session(self, request: web.Request) -> web.StreamResponse:
        stopped = await self.sessions.end_session(self._session(request))
        return web.json_response({"stopped": stopped})

    async def _start_sandbox(self, request: web.Request) -> web.StreamResponse:
        spec = wire.decode_spec(await _read_json(request))
        self._check_spec(spec)
        return web.json_response({"id": await self.sessions.start(self._session(request), spec)})

    def _check_spec(self, spec: SandboxSpec) -> None:
        if spec.network == "host" and not self._host_network:
            raise ValueError("network: 'host' is not allowed by this hub (--allow-host-network)")
        # Names and digests are of what this host's store has anyway.
        if spec.image is None or not spec.image.startswith("/"):
            return
        path = Path(spec.image).resolve()
        if not any(path.is_relative_to(folder) for folder in self._image_folders):
            raise ValueError(
                f"image: {spec.image!r} is not allowed by this hub; a digest, a name, or a folder "
                "below one that --allow-images names, is"
            )

    async def _stop_sandbox(self, request: web.Request) -> web.StreamResponse:
        await self.sessions.stop(self._session(request), request.match_info["id"])
        return web.json_response({})

    async def _snapshot(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"image": await self._sandbox(request).snapshot()})

    async def _fork(self, request: web.Request) -> web.StreamResponse:
        name = await self.sessions.fork(self._session(request), request.match_info["id"])
        return web.json_response({"id": name})

    async def _reset(self, request: web.Request) -> web.StreamResponse:
        await self._sandbox(request).reset()
        return web.json_response({})

    async def _run_command(self, request: web.Request) -> web.StreamResponse:
        sandbox = self._sandbox(request)
        arguments = _decode_command(await _read_json(request))
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

        def note_output(stream: str, data: bytes) -> None:
            events.put_nowait({"stream": stream, "data": wire.encode_bytes(data)})

        running = asyncio.ensure_future(_run_to_end(sandbox, arguments, note_output, events))
        try:
            while True:
                event = await events.get()
                await response.write(wire.encode_event(event))
                if "stream" not in event:
                    break
        finally:
            running.cancel()
            # Its command is killed.
            await asyncio.gather(running, return_exceptions=True)
        await response.write_eof()
        return response

    async def _upload(self, request: web.Request) -> web.StreamResponse:
        sandbox = self._sandbox(request)
        target = _query_text(request, "path")
        with tempfile.TemporaryDirectory(prefix="sandboxhub-") as folder:
            copy = Path(folder, "copy")
            packed = Path(folder, "archive")
            with packed.open("wb") as file:  # noqa: ASYNC230  a page of the cache at a time
                total = 0
                async for piece in request.content.iter_chunked(_PIECE):
                    total += len(piece)
                    if total > wire.MAX_UPLOAD:
                        raise ValueError(f"an upload has at most {wire.MAX_UPLOAD} bytes")
                    file.write(piece)

            def unpack() -> None:
                with packed.open("rb") as stream:
                    archive.read_archive(stream, str(copy), trusted=True)

            await asyncio.to_thread(unpack)
            await sandbox.upload(copy, target)
        return web.json_response({})

    async def _download(self, request: web.Request) -> web.StreamResponse:
        sandbox = self._sandbox(request)
        source = _query_text(request, "path")
        max_bytes = int(_query_text(request, "max_bytes"))
        with tempfile.TemporaryDirectory(prefix="sandboxhub-") as folder:
            copy = Path(folder, "copy")
            packed = Path(folder, "archive")
            await sandbox.download(source, copy, max_bytes=max_bytes)

            def pack() -> None:
                with packed.open("wb") as stream:
                    archive.write_archive(str(copy), stream, links=False)

            await asyncio.to_thread(pack)
            response = web.StreamResponse(headers={"Content-Type": "application/x-tar"})
            await response.prepare(request)
            with packed.open("rb") as file:  # noqa: ASYNC230  likewise
                while piece := file.read(_PIECE):
                    await response.write(piece)
            await response.write_eof()
        return response


async def _run_to_end(
    sandbox: EpisodeSandbox,
    arguments: dict[str, Any],
    note_output: Callable[[str, bytes], None],
    events: asyncio.Queue[dict[str, Any]],
) -> None:
    try:
        result = await sandbox.run_command(**arguments, on_output=note_output)
    except ValueError as error:
        events.put_nowait({"error": "value", "text": str(error)})
    except SandboxError as error:
        events.put_nowait({"error": "failed", "text": str(error)})
    else:
        events.put_nowait(
            {
                "exit": result.exit_code,
                "timed_out": result.timed_out,
                "is_truncated": result.is_truncated,
                # What the sandbox says besides what the command wrote.
                "stderr": wire.encode_bytes(result.stderr),
            }
        )


def _decode_command(content: Any) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ValueError("an object is needed")
    command = content.get("command")
    is_list = isinstance(command, list) and all(isinstance(word, str) for word in command)
    if not (isinstance(command, str) or (is_list and command)):
        raise ValueError("command: a text or a list of texts is needed")
    arguments: dict[str, Any] = {"command": command}
    for name in ("workdir", "user"):
        value = content.get(name)
        if not isinstance(value, str | None):
            raise ValueError(f"{name}: {value!r} is not allowed; a text is")
        arguments[name] = value
    arguments["env"] = wire.check_variables(content.get("env") or {})
    arguments["stdin"] = wire.decode_bytes(content.get("stdin", ""))
    for name in ("timeout_s", "max_output"):
        value = content.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e9:
            raise ValueError(f"{name}: {value!r} is not allowed; a number is")
        arguments[name] = value if name == "timeout_s" else int(value)
    return arguments


async def _read_json(request: web.Request) -> Any:
    with contextlib.suppress(json.JSONDecodeError):
        return await request.json()
    raise ValueError("the body is not valid JSON")


def _query_text(request: web.Request, name: str) -> str:
    text = request.query.get(name)
    if text is None:
        raise ValueError(f"{name} is missing in the address")
    return text


def _refuse(status: int, kind: str, text: str) -> web.Response:
    return web.json_response({"error": kind, "text": text}, status=status)
