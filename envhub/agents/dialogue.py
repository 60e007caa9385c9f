"""Makes the messages of an agent's calls those of its episode, for rewards that read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from broker.contract import wire
from envhub.envs.plain_row import BadRowError, plain_row
from rlearner_text.openai.request_bodies import ChatMessage


def dialogue_messages(
    chat: Sequence[ChatMessage], first: int, num_turns: int
) -> list[wire.EpisodeMessage]:
    """Return the messages of a sample's last call and its answer.

    Args:
        chat: the messages; the last one is the answer.
        first: which turn of the episode is the sample's first.
        num_turns: turns of the sample; they are the last ones of the assistant.
    """
    messages = [_read_message(message.plain()) for message in chat]
    places = [place for place, message in enumerate(messages) if message.role == "assistant"]
    sampled = places[-num_turns:]
    for turn, place in enumerate(sampled, start=first + num_turns - len(sampled)):
        messages[place] = replace(messages[place], turn=turn)
    return messages


def _read_message(plain: dict[str, Any]) -> wire.EpisodeMessage:
    functions = [call["function"] for call in plain.get("tool_calls", ())]
    calls = [
        wire.EpisodeToolCall(name=each["name"], arguments=_read_arguments(each["arguments"]))
        for each in functions
    ]
    return wire.EpisodeMessage(role=plain["role"], content=plain["content"], tool_calls=calls)


def _read_arguments(arguments: object) -> dict[str, Any]:
    """Return the arguments of a call; none if no message can hold them."""
    try:
        return plain_row(arguments)
    except BadRowError:
        return {}
