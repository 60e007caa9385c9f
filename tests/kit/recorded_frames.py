"""Reads the frames that an evaluated episode leaves, see ``envhub.episodes.frames``."""

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


def read_frames(frames: Sequence[str]) -> RecordedEpisode:
    """What ``Group.frames`` holds.

    Raises:
        UserError: these are not frames of this kind.
    """
    try:
        start, *rest = (json.loads(one) for one in frames)
        return RecordedEpisode(
            start["task_index"], start["split"], start["seed"], [one["action"] for one in rest]
        )
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"these are no recorded frames: {type(error).__name__}: {error}") from None
