"""The provider ``remote``: sandboxes of other hosts, on which ``sandboxhub`` runs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp

from broker.settings.secret import SecretRef
from rlearner_sandbox.hub import wire
from rlearner_sandbox.providers import archive
from rlearner_sandbox.providers.base import ExecResult, OnOutput, SandboxError, SandboxSpec
from rlearner_sandbox.providers.pool import Breaker

TOKEN_VARIABLE: Final = "RL_SANDBOXHUB_TOKEN"
CONNECT_S: Final = 10.0
# For an answer, besides what a command may take itself.
ANSWER_S: Final = 120.0
_PIECE: Final = 1 << 16


class RemoteProvider:
    """Sandboxes of one or several hubs; a hub that fails is left out for a while.

    Args:
        url: address of a ``sandboxhub``, or several.
        token: what the hubs require, as ``{env: NAME}`` or ``{file: PATH}``; None: the variable
            RL_SANDBOXHUB_TOKEN.
        insecure: whether addresses of other hosts may be ``http://``.

    Raises:
        ValueError: if an address or the token is missing or not allowed.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        token: str | Mapping[str, str] | None = None,
        insecure: bool = False,
    ) -> None:
        urls = [url] if isinstance(url, str) else list(url)
        if not urls:
            raise ValueError("url: at least one address of a sandboxhub is needed")
        for address in urls:
            _check_url(address, insecure)
        if isinstance(token, Mapping):
            token = SecretRef(**token).require("provider_args.token")
        token = token or os.environ.get(TOKEN_VARIABLE, "")
        if not token:
            raise ValueError(f"token: none is given, and {TOKEN_VARIABLE} is not set")
        self._hubs = [HubClient(address.rstrip("/"), token) for address in urls]
        self._snapshots: dict[str, HubClient] = {}

    async def start(self, spec: SandboxSpec) -> RemoteSandbox:
        """Return a running sandbox of the hub with the fewest, or of another if that fails."""
        hubs = sorted(self._hubs, key=lambda hub: hub.num_sandboxes)
        if spec.image in self._snapshots:
            hubs = [self._snapshots[spec.image]]
        failure = SandboxError("there is no sandboxhub")
        for hub in hubs:
            _check_endpoint(spec, hub.url)
            try:
                return RemoteSandbox(self, hub, await hub.start(spec))
            except SandboxError as error:
                failure = error
        raise failure

    def note_snapshot(self, image: str, hub: HubClient) -> None:
        """Note which hub has an image."""
        self._snapshots[image] = hub

    async def close(self) -> None:
        """Stop every sandbox of this provider."""
        for hub in self._hubs:
            await hub.close()


class HubClient:
    """The connection to one hub; its session ends with this process."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url
        self.num_sandboxes = 0
        self.breaker = Breaker()
        self._headers = {
            "Authorization": f"Bearer {token}",
            wire.SESSION_HEADER: secrets.token_hex(16),
        }
        self._session: aiohttp.ClientSession | None = None
        self._pinging: asyncio.Task[None] | None = None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                timeout=timeout,
                connector=aiohttp.TCPConnector(limit=0),
                trust_env=False,
            )
            self._pinging = asyncio.ensure_future(self._ping())
        return self._session

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(wire.PING_S)
            with contextlib.suppress(SandboxError, ValueError):
                await self.ask("POST", "/v1/session")

    async def start(self, spec: SandboxSpec) -> str:
        """Start a sandbox and return its id."""
        self.breaker.check()
        try:
            answer = await self.ask("POST", "/v1/sandboxes", body=wire.encode_spec(spec))
        except SandboxError as error:
            self.breaker.note_failure(str(error))
            raise
        self.breaker.note_success()
        return str(answer["id"])

    async def ask(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        params: Mapping[str, str] | None = None,
        data: Any = None,
        answer_s: float = ANSWER_S,
    ) -> Any:
        """Send a request and return its answer.

        Raises:
            ValueError, FileNotFoundError: as the hub's provider raised them.
            SandboxError: if the hub fails or cannot be reached.
        """
        async with self.stream(
            method, path, body=body, params=params, data=data, answer_s=answer_s
        ) as response:
            return await response.json()

    @contextlib.asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        params: Mapping[str, str] | None = None,
        data: Any = None,
        answer_s: float = ANSWER_S,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request and yield its response; raises what ``ask`` raises."""
        try:
            async with asyncio.timeout(answer_s):
                async with self._open().request(
                    method, self.url + path, json=body, params=params, data=data
                ) as response:
                    if response.status != 200:
                        _raise_refusal(response.status, await response.content.read(1 << 16))
                    yield response
        except TimeoutError:
            raise SandboxError(f"{self.url} did not answer within {answer_s:.0f} s") from None
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, FileNotFoundError):
                raise
            reason = str(error) or type(error).__name__
            raise SandboxError(f"{self.url} cannot be reached: {reason}") from None

    async def close(self) -> None:
        """End the session with all its sandboxes."""
        if self._session is None:
            return
        if self._pinging is not None:
            self._pinging.cancel()
        with contextlib.suppress(SandboxError, ValueError):
            await self.ask("DELETE", "/v1/session", answer_s=30.0)
        await self._session.close()
        self._session = None


class RemoteSandbox:
    """A sandbox of a hub, see ``EpisodeSandbox``."""

    def __init__(self, provider: RemoteProvider, hub: HubClient, name: str) -> None:
        self._provider = provider
        self._hub = hub
        self._path = f"/v1/sandboxes/{name}"
        self._is_stopped = False
        hub.num_sandboxes += 1

    async def run_command(
        self,
        command: str | Sequence[str],
        *,
        workdir: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout_s: float = 60.0,
        stdin: bytes = b"",
        max_output: int = 1 << 20,
        on_output: OnOutput | None = None,
    ) -> ExecResult:
        """Run a command to its end, see ``EpisodeSandbox.run_command``."""
        self._check_alive()
        body = {
            "command": command if isinstance(command, str) else list(command),
            "workdir": workdir,
            "env": dict(env or {}),
            "user": user,
            "timeout_s": timeout_s,
            "stdin": wire.encode_bytes(stdin),
            "max_output": max_output,
        }
        kept: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        path = f"{self._path}/commands"
        answer_s = timeout_s + ANSWER_S
        async with self._hub.stream("POST", path, body=body, answer_s=answer_s) as response:
            async for event in _read_events(response):
                if "stream" in event:
                    data = wire.decode_bytes(event["data"])
                    kept[event["stream"]] += data
                    if on_output is not None:
                        with contextlib.suppress(Exception):
                            on_output(event["stream"], data)
                    continue
                if "error" in event:
                    _raise_error(event["error"], event["text"])
                return ExecResult(
                    exit_code=int(event["exit"]),
                    stdout=bytes(kept["stdout"]),
                    stderr=wire.decode_bytes(event["stderr"]),
                    is_truncated=bool(event["is_truncated"]),
                    timed_out=bool(event["timed_out"]),
                )
        raise SandboxError(f"{self._hub.url} closed the connection in a command")

    async def upload(self, source: Path, target: str) -> None:
        """Copy a file or folder of this host to the path ``target`` inside."""
        self._check_alive()
        with tempfile.TemporaryFile() as packed:

            def pack() -> None:
                archive.write_archive(str(source), packed, links=True)
                packed.seek(0)

            await asyncio.to_thread(pack)
            path = f"{self._path}/files"
            await self._hub.ask("PUT", path, params={"path": target}, data=packed)

    async def download(self, source: str, target: Path, *, max_bytes: int = 64 << 20) -> None:
        """Copy the file or folder ``source`` from inside to ``target`` on this host."""
        self._check_alive()
        params = {"path": source, "max_bytes": str(max_bytes)}
        # With the headers of many small files.
        most = 2 * max_bytes + (64 << 20)
        with tempfile.TemporaryFile() as packed:
            path = f"{self._path}/files"
            async with self._hub.stream("GET", path, params=params) as response:
                total = 0
                async for piece in response.content.iter_chunked(_PIECE):
                    total += len(piece)
                    if total > most:
                        raise SandboxError(f"{self._hub.url} sends more than was asked for")
                    packed.write(piece)
            packed.seek(0)

            def unpack() -> None:
                archive.read_archive(packed, str(target), trusted=False, max_bytes=max_bytes)

            await asyncio.to_thread(unpack)

    async def snapshot(self) -> str:
        """Keep what was written so far as an image of its hub."""
        self._check_alive()
        answer = await self._hub.ask("POST", f"{self._path}/snapshot")
        self._provider.note_snapshot(answer["image"], self._hub)
        return str(answer["image"])

    async def fork(self) -> RemoteSandbox:
        """Return a new sandbox of its hub that starts with what this one has written so far."""
        self._check_alive()
        answer = await self._hub.ask("POST", f"{self._path}/fork")
        return RemoteSandbox(self._provider, self._hub, str(answer["id"]))

    async def reset(self) -> None:
        """End every process and drop all that was written since the start."""
        self._check_alive()
        await self._hub.ask("POST", f"{self._path}/reset")

    async def stop(self) -> None:
        """End every process and remove the sandbox; a second call does nothing."""
        if self._is_stopped:
            return
        self._is_stopped = True
        self._hub.num_sandboxes -= 1
        # A hub that is gone has ended it, or ends it with the session.
        with contextlib.suppress(SandboxError):
            await self._hub.ask("DELETE", self._path)

    def _check_alive(self) -> None:
        if self._is_stopped:
            raise SandboxError("the sandbox was stopped")


async def _read_events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    pending = bytearray()
    async for piece in response.content.iter_any():
        pending += piece
        *lines, rest = pending.split(b"\n")
        pending = bytearray(rest)
        for line in lines:
            try:
                yield json.loads(line)
            except ValueError:
                raise SandboxError("the hub sent a line that is no JSON") from None


def _raise_refusal(status: int, body: bytes) -> None:
    try:
        content = json.loads(body)
        _raise_error(str(content["error"]), str(content["text"]))
    except (KeyError, TypeError, json.JSONDecodeError):
        raise SandboxError(f"the hub answered with status {status}") from None


def _raise_error(kind: str, text: str) -> None:
    if kind == "value":
        raise ValueError(text)
    if kind == "missing":
        raise FileNotFoundError(text)
    raise SandboxError(text)


def _is_loopback(host: str | None) -> bool:
    try:
        return host == "localhost" or ip_address(host or "").is_loopback
    except ValueError:
        return False


def _check_url(url: str, insecure: bool) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
        raise ValueError(f"url: {url!r} is not allowed; https://HOST:PORT is")
    if parts.scheme == "http" and not _is_loopback(parts.hostname) and not insecure:
        raise ValueError(
            f"url: {url!r} is not allowed; the token would be sent in clear to another host: use "
            "https://, or insecure: true"
        )


def _check_endpoint(spec: SandboxSpec, url: str) -> None:
    if spec.network != "endpoint" or _is_loopback(urlsplit(url).hostname):
        return
    if _is_loopback(urlsplit(spec.endpoint or "").hostname):
        raise ValueError(
            f"endpoint: {spec.endpoint!r} is not allowed; the hub at {url} reaches only addresses "
            "of other interfaces than loopback"
        )
