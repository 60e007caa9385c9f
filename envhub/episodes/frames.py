"""What an evaluated episode leaves behind for a replay: one JSON object a frame, in ``Group.frames``.

The first holds where the episode started, each further one the text sent and what it led to::

    {"task_index": 3, "split": "eval", "seed": 77, "text": "PFFF\\nFHFH\\nFFFH\\nHFFG"}
    {"action": "R", "text": "SPFF\\nFHFH\\nFFFH\\nHFFG"}
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from broker.errors import UserError
from envhub.envs.base import Split


@dataclass(frozen=True)
class RecordedEpisode:
    """A recorded episode: where it started and the texts sent."""

    task_index: int
    split: Split
    seed: int
    actions: list[str]


def first_frame(task_index: int, split: Split, seed: int, text: str) -> str:
    """The frame before the first action."""
    return json.dumps({"task_index": task_index, "split": split, "seed": seed, "text": text}, ensure_ascii=False)


def frame(action: str, text: str) -> str:
    """The frame after an action."""
    return json.dumps({"action": action, "text": text}, ensure_ascii=False)


def read_frames(frames: Sequence[str]) -> RecordedEpisode:
    """What ``Group.frames`` holds.

    Raises:
        UserError: these are not frames of this kind.
    """
    try:
        start, *rest = (json.loads(one) for one in frames)
        return RecordedEpisode(start["task_index"], start["split"], start["seed"], [one["action"] for one in rest])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"these are no recorded frames: {type(error).__name__}: {error}") from None
