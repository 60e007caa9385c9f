"""The conversation of an episode as a process reward model reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rewardhub.rewards.base import NoScore, Sample


@dataclass(frozen=True)
class EpisodeText:
    """Messages of an episode.

    Attributes:
        messages: in OpenAI's form.
        turns: by turn of the policy, the index of its message.
    """

    messages: list[dict[str, Any]]
    turns: list[int]


def read_episode(sample: Sample, system_prompt: str | None = None) -> EpisodeText:
    """Return the conversation of an episode; without messages, prompt and response.

    Args:
        system_prompt: replaces the first message of the system, an empty one removes it.

    Raises:
        NoScore: if a turn has no message.
    """
    messages = [dict(message) for message in sample.messages]
    turns = [turn.message for turn in sample.turns]
    if not messages and sample.num_turns == 1:
        messages = [
            {"role": "user", "content": sample.prompt},
            {"role": "assistant", "content": sample.response},
        ]
        turns = [1]
    is_complete = bool(turns) and len(turns) == sample.num_turns
    if not is_complete or any(not 0 <= turn < len(messages) for turn in turns):
        raise NoScore(
            f"domain {sample.domain!r}, task {sample.task_index}: the messages of its "
            f"{sample.num_turns} turns are not there"
        )
    if system_prompt is None:
        return EpisodeText(messages, turns)
    has_system = messages[0]["role"] == "system"
    own = [{"role": "system", "content": system_prompt}] if system_prompt else []
    shift = len(own) - has_system
    return EpisodeText([*own, *messages[has_system:]], [turn + shift for turn in turns])
