"""Prints the events of ``rlearner up``: lines for people, or JSON objects for programs."""

from __future__ import annotations

import time
from typing import Any

from broker.system.visible_text import visible, visible_json


class Output:
    """Prints events to stdout.

    Args:
        as_json: one object per line, with ``event``, ``time`` (seconds since 1970) and the event's
            fields.
    """

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json

    def __call__(self, event: str, text: str, **fields: Any) -> None:
        """Print an event.

        Args:
            text: lines for people; ``message`` of an object without fields.
        """
        if self.as_json:
            line = {"event": event, "time": time.time(), **(fields or {"message": text})}
            print(visible_json(line), flush=True)
        elif text:
            print(visible(text, newlines=True), flush=True)

    def stamped(self, event: str, text: str, **fields: Any) -> None:
        """Print an event with its time, which an object always has."""
        if not self.as_json:
            text = f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}"
        self(event, text, **fields)
