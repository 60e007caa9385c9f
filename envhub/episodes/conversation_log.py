"""Keeps an episode's conversation as text, for rewards that read all of it."""

from __future__ import annotations

from collections.abc import Sequence

from broker.contract import wire
from envhub.domain import Domain
from envhub.envs.base import History
from rlearner_text.template_rules import Role
from rlearner_text.tool_calls import ToolCall


class ConversationLog:
    """The messages of one episode: what the environment shows, not what a memory makes of it.

    Attributes:
        messages: in order; empty unless the domain's rewards may read them.
    """

    def __init__(self, domain: Domain) -> None:
        self._domain = domain
        self._num_turns = 0
        self.messages: list[wire.EpisodeMessage] = []

    def open(self, observation: str, history: History = ()) -> None:
        """Begin with the system prompt, the examples, and the first observation."""
        system, _, examples = self._domain.opening_after(history)
        if system:
            self._add("system", system)
        for question, answer in examples:
            self._add("user", question)
            self._add("assistant", answer)
        self._add("user", observation)

    def add_turn(self, text: str, calls: Sequence[ToolCall]) -> None:
        """Append what the policy wrote, and the tool calls in it."""
        tool_calls = [
            wire.EpisodeToolCall(name=call.name, arguments=call.arguments) for call in calls
        ]
        self._add("assistant", text, tool_calls, self._num_turns)
        self._num_turns += 1

    def add_observation(self, role: Role, text: str) -> None:
        """Append what the environment or its tools answered."""
        self._add(role, text)

    def _add(
        self,
        role: wire.MessageRole,
        text: str,
        tool_calls: Sequence[wire.EpisodeToolCall] = (),
        turn: int = -1,
    ) -> None:
        if self._domain.sends_messages:
            message = wire.EpisodeMessage(
                role=role, content=text, tool_calls=list(tool_calls), turn=turn
            )
            self.messages.append(message)
