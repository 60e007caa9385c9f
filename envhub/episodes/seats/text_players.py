"""Players that exchange text: a model at an OpenAI-compatible endpoint, and a script."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec

from broker.settings.schema.policies import PolicySection
from envhub.envs.base import Environment
from envhub.players.base import PlayerView
from envhub.task import EpisodeFailed
from envhub.workers.calls import CallFailed, EnvironmentCalls
from envhub.workers.returned import ReturnedValueError, step_result
from envhub.workers.worker_pool import NoWorker
from rlearner_text.openai.client import EndpointClient, EndpointError


class TextPlayer(Protocol):
    """A player in one seat of one episode.

    Attributes:
        must_be_legal: whether an action that the environment refuses is an error of the player.
    """

    must_be_legal: bool

    async def begin(self, seed: int) -> None: ...
    async def answer(self, view: PlayerView) -> str: ...
    async def close(self, *, is_healthy: bool) -> None: ...


class EndpointPlayer:
    """A model at an endpoint, which gets the seat's conversation with each request.

    Args:
        temperature: of the domain's sampling, if the policy has none of its own.
    """

    must_be_legal = False  # a model may be wrong, and the environment says what that costs

    def __init__(self, client: EndpointClient, section: PolicySection, temperature: float) -> None:
        self._client = client
        self._section = section
        self._temperature = temperature
        self._messages: list[dict[str, str]] = []

    async def begin(self, seed: int) -> None:
        if self._section.system_prompt:
            self._messages.append({"role": "system", "content": self._section.system_prompt})

    async def answer(self, view: PlayerView) -> str:
        """Return the endpoint's answer.

        Raises:
            EpisodeFailed: if it gives none, or one that is not a text of an assistant.
        """
        self._messages.append({"role": "user", "content": view.text})
        section = self._section
        temperature = self._temperature if section.temperature is None else section.temperature
        body: dict[str, Any] = {
            "model": section.model,
            "messages": self._messages,
            "max_tokens": section.max_tokens,
            "temperature": temperature,
        }
        try:
            reply = await self._client.post("/chat/completions", body)
        except (EndpointError, RuntimeError) as error:
            raise EpisodeFailed("generate", str(error)) from error
        content = read_answer(reply)
        self._messages.append({"role": "assistant", "content": content})
        return content

    async def close(self, *, is_healthy: bool) -> None:
        """Nothing to close: hubs keep the connection."""


def read_answer(reply: dict[str, Any]) -> str:
    """Return the text of a chat completion.

    Raises:
        EpisodeFailed: if it is none, or speaks for somebody else.
    """
    choices = reply.get("choices")
    message = choices[0].get("message") if isinstance(choices, list) and choices else None
    if not isinstance(message, dict):
        raise EpisodeFailed("env", "the endpoint's answer has no choices[0].message")
    role = message.get("role", "assistant")
    if role != "assistant":
        raise EpisodeFailed("env", f"it spoke out of turn: as {str(role)[:40]!r}, not as assistant")
    if message.get("tool_calls"):
        raise EpisodeFailed("env", "it called tools, which a seat at an endpoint does not have")
    content = message.get("content")
    if not isinstance(content, str) or not content.strip():
        raise EpisodeFailed("env", "it said nothing in its turn")
    return content


class ScriptPlayer:
    """A script, in an environment of its own that runs it (``envhub.players.host``).

    Args:
        release: takes the environment back, and whether it may be used again.
    """

    must_be_legal = True

    def __init__(
        self,
        calls: EnvironmentCalls,
        lease: Callable[[], Awaitable[Environment]],
        release: Callable[[Environment, bool], None],
    ) -> None:
        self._calls = calls
        self._lease = lease
        self._release = release
        self._host: Environment | None = None

    async def begin(self, seed: int) -> None:
        """Start the script.

        Raises:
            EpisodeFailed: if it fails, or no process can be started for it.
        """
        try:
            self._host = await self._lease()
        except NoWorker as error:
            raise EpisodeFailed("machine", str(error)) from error
        except CallFailed as error:
            raise EpisodeFailed("env", str(error), error.trace) from error
        await self._call("reset", 0, "train", seed)

    async def answer(self, view: PlayerView) -> str:
        """Return what the script says.

        Raises:
            EpisodeFailed: if it fails or says nothing.
        """
        result = await self._call("step", msgspec.json.encode(view).decode())
        try:
            reply = step_result(result).observation.text
        except ReturnedValueError as error:
            raise EpisodeFailed("env", str(error)) from error
        if not reply.strip():
            raise EpisodeFailed("env", "it said nothing in its turn")
        return reply

    async def close(self, *, is_healthy: bool) -> None:
        if self._host is not None:
            self._release(self._host, is_healthy)

    async def _call(self, method: str, *args: Any) -> Any:
        assert self._host is not None
        try:
            return await self._calls.call(self._host, method, *args)
        except CallFailed as error:
            raise EpisodeFailed("env", str(error), error.trace) from error
