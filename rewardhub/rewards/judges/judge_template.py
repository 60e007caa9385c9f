"""Fills the template of a judge's question with an episode."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from rewardhub.rewards.base import Sample
from rewardhub.rewards.judges.conversation import conversation_text

_SLOT: Final = re.compile(r"\{([a-z]+)\}")


def check_template(value: str, *others: str) -> str:
    """Return a template.

    Args:
        others: names of further slots that it may hold.

    Raises:
        ValueError: if it shows neither the response nor the conversation.
    """
    if "{response}" not in value and "{conversation}" not in value:
        slots = ", ".join(f"{{{name}}}" for name in ("prompt", "reference", *others))
        raise ValueError(f"it must hold {{response}} or {{conversation}}; also allowed: {slots}")
    return value


def fill_template(
    template: str, sample: Sample, max_chars: int, others: Mapping[str, str]
) -> tuple[str, bool]:
    """Return the question about an episode, and whether its response is not shown as a whole.

    Args:
        max_chars: shown of the end of the response, or of the conversation.
        others: what replaces further slots, by name.
    """
    conversation = conversation_text(sample) if "{conversation}" in template else ""
    slots = {
        "prompt": sample.prompt,
        "response": sample.response[-max_chars:],
        "conversation": conversation[-max_chars:],
        "reference": sample.reference or "(none)",
        **others,
    }
    # One substitution: slots in the policy's text are never replaced.
    question = _SLOT.sub(lambda slot: slots.get(slot[1], slot[0]), template)
    return question, max(len(sample.response), len(conversation)) > max_chars
