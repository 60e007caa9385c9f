"""What the agents of these tests share: their task comes on stdin, their reward leaves on stdout."""

from __future__ import annotations

import json
import sys
from typing import Any

TASK: dict[str, Any] = json.load(sys.stdin)
QUESTION = f"Is {TASK['task_index']} even? Say yes or no."


def done(said: object, **metrics: float) -> None:
    """Print the reward of what was said: something that differs from answer to answer, so that
    there is something to train on.
    """
    text = str(said)
    print(
        json.dumps(
            {"reward": (sum(map(ord, text)) % 17) / 16, "response": text[:1000], "metrics": metrics}
        )
    )
