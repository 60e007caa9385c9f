"""Environments of an OpenEnv server, over its protocol (https://github.com/meta-pytorch/OpenEnv).

A server keeps one environment per WebSocket connection to ``/ws``, so an instance here is one
connection, used for one episode after another. A message is JSON: ``{"type": "reset" or "step" or
"close", "data": …}``. The answer is ``{"type": "observation", "data": {"observation": …, "reward":
…, "done": …}}`` or ``{"type": "error", "data": {"message": …, "code": …}}``. ``GET /schema``
returns the form of actions. OpenEnv need not be installed. An action that the server rejects as
malformed (``VALIDATION_ERROR``) counts as invalid; any other error fails the episode, which is then
tried again.
"""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import aiohttp
from pydantic import Field, NonNegativeFloat, PositiveFloat

from broker.contract import strict
from broker.errors import ConfigError, NotInstalled, reason_of
from broker.settings.config import EndpointMark, Section
from broker.settings.registry import resolve
from envhub.envs.adapters.foreign import seed_of
from envhub.envs.base import Environment, Observation, Split, StepResult
from envhub.envs.text.answers import tagged

MAX_MESSAGE_BYTES: Final = 8 << 20
# for the server's schema
CHECK_S: Final = 10.0


class OpenEnvArgs(Section):
    """``env_args`` of ``openenv``."""

    harmless = (
        "action", "action_field", "observation_field", "success_reward", "format_penalty",
        "answer_tag", "connect_timeout_s",
    )  # fmt: skip

    url: Annotated[str, EndpointMark()]  # of the server, for example http://127.0.0.1:8000
    # the text is one field of the action, or the whole action in JSON
    action: Literal["field", "json"] = "field"
    action_field: str = "message"  # that field
    action_args: dict[str, Any] = Field(default={})  # further fields of every action
    reset_args: dict[str, Any] = Field(default={})  # of every reset, in addition to the seed
    observation_field: str = ""  # the field of the observation to show; empty: all of them in JSON
    # or a dotted path or file path to a function of (observation as a dict) that returns text
    observe: str = ""
    success_reward: float = 1.0  # an episode whose last step has at least this reward is a success
    format_penalty: NonNegativeFloat = 0.0  # taken from the reward for a malformed action
    # read the action from the last <answer>…</answer> instead of the whole text
    answer_tag: bool = False
    connect_timeout_s: PositiveFloat = 10.0


class ServerError(RuntimeError):
    """The server answered with an error, or against the protocol."""


class OpenEnv(Environment):
    """One session of a server."""

    Args = OpenEnvArgs
    isolation = "none"  # it only waits for the server

    args: OpenEnvArgs

    def __init__(self, args: OpenEnvArgs) -> None:
        super().__init__(args)
        observe = resolve("observe", args.observe, {}) if args.observe else self._plain
        self._observe: Callable[[dict[str, Any]], Any] = observe
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._seen: dict[str, Any] = {}
        self._shown = ""

    @classmethod
    def check(cls, args: OpenEnvArgs) -> None:
        if urllib.parse.urlsplit(args.url).scheme not in ("http", "https", "ws", "wss"):
            raise ConfigError("url", args.url, "an address such as http://127.0.0.1:8000")
        cls(args)
        fields = (_fetch_schema(args.url).get("action") or {}).get("properties")
        if args.action == "field" and isinstance(fields, dict) and args.action_field not in fields:
            allowed = f"a field of the server's actions: {', '.join(fields)}"
            raise ConfigError("action_field", args.action_field, allowed)

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        raise NotInstalled("environment openenv: it needs a running server")

    async def reset(self, task_index: int, split: Split, seed: int) -> Observation:
        # the server may have ended the session between two episodes
        if self._socket is None or self._socket.closed:
            await self.close()
            await self._connect()
        data, _ = await self._ask(
            "reset", {**self.args.reset_args, "seed": seed_of(task_index, split, seed)}
        )
        return self._show(data)

    async def step(self, text: str) -> StepResult:
        action = self._action(tagged(text, self.args.answer_tag))
        malformed = StepResult(Observation(self._shown), -self.args.format_penalty, False, False)
        if action is None:
            return malformed
        data, problem = await self._ask("step", action)
        if problem:
            self._shown = problem
            return StepResult(Observation(problem), malformed.reward, False, False)
        is_done = bool(data.get("done"))
        reward = float(data.get("reward") or 0.0)
        return StepResult(
            self._show(data), reward, is_done, True, is_done and reward >= self.args.success_reward
        )

    def text_frame(self) -> str:
        return self._shown

    async def close(self) -> None:
        """End the session."""
        socket = self._socket
        session = self._session
        self._socket = None
        self._session = None
        try:
            if socket is not None and not socket.closed:
                # the server may be gone
                with contextlib.suppress(aiohttp.ClientError, ConnectionError):
                    await socket.send_str('{"type": "close"}')
                await socket.close()
        finally:
            if session is not None:
                await session.close()

    async def _connect(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.args.connect_timeout_s)
        self._session = aiohttp.ClientSession(timeout=timeout)
        url = f"{self.args.url.rstrip('/')}/ws"
        try:
            self._socket = await self._session.ws_connect(url, max_msg_size=MAX_MESSAGE_BYTES)
        except (aiohttp.ClientError, TimeoutError) as error:
            await self.close()
            raise ServerError(f"no OpenEnv server at {url}: {reason_of(error)}") from None

    async def _ask(self, kind: str, data: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """Send a message. Return (the answer's data, what is wrong with the action)."""
        assert self._socket is not None
        await self._socket.send_str(json.dumps({"type": kind, "data": data}))
        message = await self._socket.receive()
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise ServerError(
                f"{kind}: the server closed the connection ({message.type.name.lower()})"
            )
        try:
            answer = strict.parse_json(message.data)
            payload = answer["data"]
            if answer["type"] == "error":
                problem = f"{payload['message']} ({payload['code']})"
                if kind == "step" and payload["code"] == "VALIDATION_ERROR":
                    return {}, problem
                raise ServerError(f"{kind}: the server answered: {problem}")
            if answer["type"] != "observation" or not isinstance(payload["observation"], dict):
                raise ServerError(
                    f"{kind}: the server answered {answer['type']!r}, not an observation"
                )
        except (ValueError, KeyError, TypeError, RecursionError):
            excerpt = f"{message.data[:200]!r}"
            raise ServerError(
                f"{kind}: the server answered {excerpt}, which is not OpenEnv's protocol"
            ) from None
        return payload, ""

    def _action(self, text: str) -> dict[str, Any] | None:
        if self.args.action == "field":
            return {**self.args.action_args, self.args.action_field: text}
        try:
            action = strict.parse_json(text)
        except strict.BadJson:
            return None
        if not isinstance(action, dict):
            return None
        return {**self.args.action_args, **action}

    def _show(self, data: dict[str, Any]) -> Observation:
        self._seen = data["observation"]
        self._shown = self._observe(self._seen)
        return Observation(self._shown)

    def _plain(self, observation: dict[str, Any]) -> Any:
        name = self.args.observation_field
        if not name:
            return json.dumps(observation, ensure_ascii=False)
        if name not in observation:
            fields = ", ".join(observation) or "no fields"
            raise ServerError(f"observation_field {name!r}: the server's observation has {fields}")
        value = observation[name]
        if isinstance(value, str):
            return value
        return json.dumps(value, ensure_ascii=False)


def _fetch_schema(url: str) -> dict[str, Any]:
    """Return the server's schema of its messages.

    Raises:
        ConfigError: if there is no server, or it is not an OpenEnv server.
    """
    base = url.replace("ws", "http", 1) if url.startswith("ws") else url
    address = f"{base.rstrip('/')}/schema"
    try:
        # no proxy, as for the episodes
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(address, timeout=CHECK_S) as reply:
            schema = json.loads(reply.read(MAX_MESSAGE_BYTES))
    except (urllib.error.URLError, OSError, ValueError) as error:
        if isinstance(error, urllib.error.HTTPError):
            # it holds the connection
            error.close()
        raise ConfigError("url", url, f"the address of a running OpenEnv server: {error}") from None
    if not isinstance(schema, dict):
        raise ConfigError("url", url, f"an OpenEnv server; {address} is not a schema")
    return schema
