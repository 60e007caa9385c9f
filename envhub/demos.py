"""Writes conversations of an imperfect solver for the warm start, with a hub's prompts."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from broker.contract.wire import ACTOR
from broker.errors import ConfigError, UserError
from broker.settings.config import seat_policies
from broker.settings.run_settings import RunSettings
from broker.system.private_files import draft_of
from envhub.domain import Domain, load_domains
from envhub.envs.base import Environment, History, can_demonstrate
from envhub.servers.turn import mix
from rlearner_text.tool_calls import ToolCall

Messages = list[dict[str, Any]]


def pick_domain(settings: RunSettings, name: str | None) -> Domain:
    """Return the named domain of a config, or the only one that is trained.

    Raises:
        ConfigError: if there is no such domain, or no name and several domains.
    """
    domains = load_domains(settings)
    if name is None and len(settings.trained_domains) == 1:
        name = next(iter(settings.trained_domains))
    if name not in domains:
        raise ConfigError("--domain", name, f"one of {', '.join(domains) or 'no domains'}")
    return domains[name]


def write_demonstrations(
    settings: RunSettings,
    domain: str | None,
    *,
    episodes: int,
    noise: float,
    out: str,
    seed: int = 0,
    against: float | None = None,
) -> float:
    """Write conversations as JSONL, ``{"messages": [...]}`` a line. Return the share of successes.

    The lines of an environment with tools also have ``tools``.

    With ``against`` each task is played again with that noise; for each task that only the first
    solved, a line is the pair ``{"chosen": [...], "rejected": [...]}``. The file appears complete
    or not at all.

    Raises:
        UserError: if the domain is unknown, its environment has no solver, or the file cannot be
            written.
    """
    selected_domain = pick_domain(settings, domain)
    if not can_demonstrate(selected_domain.environment):
        raise ConfigError(
            "--domain",
            selected_domain.name,
            f"environment {selected_domain.section.env} has no solver for demonstrations",
        )
    selected_domain.check()
    target = Path(out)
    solved = 0
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with draft_of(target) as draft, draft.open("w", encoding="utf-8") as file:
            for rows, success in _iter_rows(selected_domain, episodes, noise, seed, against):
                solved += success
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    except OSError as error:
        raise UserError(f"{out}: {error.strerror}") from None
    return solved / episodes


def _iter_rows(
    domain: Domain, episodes: int, noise: float, seed: int, against: float | None
) -> Iterator[tuple[list[dict[str, Any]], bool]]:
    """Yield each episode's lines, and whether the first player solved its task."""
    extra: dict[str, Any] = {}
    if domain.tools:
        extra["tools"] = json.loads(domain.tools)
    first = demonstrations(domain, episodes=episodes, noise=noise, seed=seed)
    if against is None:
        yield from (
            ([{"messages": messages} | extra for messages in conversations], is_solved)
            for conversations, is_solved in first
        )
        return
    second = demonstrations(domain, episodes=episodes, noise=against, seed=seed)
    for (conversations, is_solved), (other_conversations, is_other_solved) in zip(
        first, second, strict=True
    ):
        if domain.memory is not None:
            raise UserError(
                f"domains.{domain.name}.context: pairs need whole conversations, not context steps"
            )
        rows = []
        if is_solved and not is_other_solved:
            rows = [{"chosen": conversations[0], "rejected": other_conversations[0]} | extra]
        yield rows, is_solved


def demonstrations(
    domain: Domain, *, episodes: int, noise: float, seed: int
) -> Iterator[tuple[list[Messages], bool]]:
    """Yield each episode's conversations and success, on training tasks 0, 1, 2 and so on.

    An episode is one conversation of each seat that the trained policy may play, or one per turn
    with context steps. The solver plays all seats.
    """
    environment = domain.make()
    with asyncio.Runner() as runner:
        try:
            yield from _play(domain, environment, runner, episodes=episodes, noise=noise, seed=seed)
        finally:
            _await_result(runner, environment.close())


def _play(
    domain: Domain,
    environment: Environment,
    runner: asyncio.Runner,
    *,
    episodes: int,
    noise: float,
    seed: int,
) -> Iterator[tuple[list[Messages], bool]]:
    rng = np.random.default_rng([seed, 1])
    for index in range(episodes):
        view: Any = _await_result(runner, environment.reset(index, "train", mix(seed, index)))
        success = False
        seats: dict[str, _SeatDemonstration] = {}
        for _ in range(domain.section.max_turns * max(len(domain.seats), 1)):
            seat = seats.setdefault(view.seat, _SeatDemonstration(domain, view.history))
            seat.observe(view.text)
            action = environment.demonstrate(rng, noise)
            is_text = isinstance(action, str)
            act: Any = environment.step if is_text else environment.use
            step: Any = _await_result(runner, act(action))
            seat.act(action)
            success = step.success
            view = step.observation
            if step.done:
                break
        conversations = [
            conversation
            for name, seat in seats.items()
            if not domain.seats or ACTOR in seat_policies(domain.section.seats[name])
            for conversation in seat.conversations
        ]
        yield conversations, success


def _await_result(runner: asyncio.Runner, value: Any) -> Any:
    """Return what a method returned, awaited if the environment is asynchronous."""
    return runner.run(_await_value(value)) if inspect.isawaitable(value) else value


async def _await_value(value: Awaitable[Any]) -> Any:
    return await value


class _SeatDemonstration:
    """What a seat sees and does in an episode, as conversations."""

    def __init__(self, domain: Domain, history: History) -> None:
        self._domain = domain
        self._history = history
        self._steps = domain.steps()
        self._action = ""
        self._role = "user"
        self.conversations: list[Messages] = []

    def observe(self, text: str) -> None:
        """Add an observation, to the conversation or as a new one."""
        if self.conversations and self._steps is None:
            self.conversations[-1].append({"role": self._role, "content": text})
            return
        prompt = text
        if self._steps is not None and not self.conversations:
            prompt = self._steps.open(text)
        elif self._steps is not None:
            prompt = self._steps.acted(self._action, text)
        self.conversations.append(self._domain.messages(prompt, self._history))

    def act(self, action: str | Sequence[ToolCall]) -> None:
        """Add what the seat did.

        Raises:
            UserError: if it called tools with context steps.
        """
        if isinstance(action, str):
            self._action = action
            self._role = "user"
            self.conversations[-1].append({"role": "assistant", "content": action})
            return
        if self._steps is not None:
            problem = "demonstrations of tool calls need whole conversations, not context steps"
            raise UserError(f"domains.{self._domain.name}.context: {problem}")
        self._role = "tool"
        self.conversations[-1].append(_call_message(action))


def _call_message(calls: Sequence[ToolCall]) -> dict[str, Any]:
    """Return the message of an assistant that calls tools, in OpenAI's form."""
    functions = [{"name": call.name, "arguments": call.arguments} for call in calls]
    tool_calls = [{"type": "function", "function": function} for function in functions]
    return {"role": "assistant", "content": "", "tool_calls": tool_calls}
