"""Builds what the policy sees at each turn: the whole conversation or a prompt made from a memory.

With ``context: full`` an episode is one conversation and one training sample. With ``context:
steps`` each turn is a conversation and a sample: the opening, the last ``history_length`` turns and
the present observation in one user message, so contexts stay short in long episodes. All samples of
an episode share its number and its total reward (Feng et al., GiGPO, arXiv 2505.10978, section 4).
``memory`` names a function to use instead of ``recent``; it may summarise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from broker.errors import ConfigError
from broker.settings.registry import check_call, resolve

Memory = Callable[[str, Sequence[tuple[str, str]], str, int], str]
MEMORIES: Final[dict[str, str]] = {
    "present": "envhub.context:present",
    "recent": "envhub.context:recent",
}


def recent(opening: str, past: Sequence[tuple[str, str]], now: str, history_length: int) -> str:
    """Return a turn's prompt: the opening, the last turns and the present observation.

    Args:
        opening: the episode's first observation.
        past: every earlier turn as (observation, action), oldest first.
        now: the present observation.
        history_length: how many earlier turns to show.
    """
    if not past:
        return opening
    first = max(0, len(past) - history_length)
    parts = [part for turn in past[first:] for part in turn]
    if first == 0:
        # the first turn's observation is the opening
        del parts[0]
    return "\n".join([opening, *parts, now])


def present(opening: str, past: Sequence[tuple[str, str]], now: str, history_length: int) -> str:
    """Return the present observation alone, where it says all that matters, as a board does."""
    return now


def load_memory(key: str, name: str) -> Memory:
    """Return the function that ``domains.<name>.memory`` names.

    Raises:
        ConfigError: if there is no such function.
    """
    try:
        memory: Memory = resolve("memories", name, MEMORIES)
    except ConfigError as error:
        raise ConfigError(key, name, error.allowed) from None
    check_call(key, name, memory, ("opening", "past", "now", "history_length"))
    return memory


@dataclass
class StepContext:
    """The turns of one episode so far; makes the next prompt from them."""

    memory: Memory
    history_length: int
    opening: str = ""
    now: str = ""
    past: list[tuple[str, str]] = field(default_factory=list)

    def open(self, observation: str) -> str:
        """Begin the episode and return its first prompt."""
        self.opening = self.now = observation
        return self._prompt()

    def acted(self, action: str, observation: str) -> str:
        """Add a turn and return the next prompt."""
        self.past.append((self.now, action))
        self.now = observation
        return self._prompt()

    def _prompt(self) -> str:
        prompt = self.memory(self.opening, self.past, self.now, self.history_length)
        if not isinstance(prompt, str):
            raise TypeError(f"memory returned {type(prompt).__name__}, not a text")
        return prompt
