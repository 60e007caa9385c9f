"""Records an evaluated episode for a replay: one JSON object per frame, in ``Group.frames``.

The first frame holds the start of the episode, each other one an action and the state after it::

    {"task_index": 3, "split": "eval", "seed": 77, "text": "PFFF\\nFHFH\\nFFFH\\nHFFG"}
    {"action": "R", "text": "SPFF\\nFHFH\\nFFFH\\nHFFG"}
"""

from __future__ import annotations

import json

from envhub.envs.base import Split


def first_frame(task_index: int, split: Split, seed: int, text: str) -> str:
    """Return the frame before the first action."""
    return json.dumps(
        {"task_index": task_index, "split": split, "seed": seed, "text": text}, ensure_ascii=False
    )


def frame(action: str, text: str) -> str:
    """Return the frame after an action."""
    return json.dumps({"action": action, "text": text}, ensure_ascii=False)
