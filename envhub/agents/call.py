"""Calls a user's function as an agent: the task is JSON on stdin, the result stdout's last line.

What the function prints goes to stderr, so that it cannot be taken for the result. Started by
``envhub.envs.agent``.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
from collections.abc import Awaitable

from broker.settings.registry import resolve


async def _await_value(value: Awaitable[object]) -> object:
    return await value


def main() -> None:
    """Call the function that ``sys.argv[1]`` names."""
    # descriptors, as C code and child processes print, too
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    task = json.load(sys.stdin)
    value = resolve("agents", sys.argv[1], {})(task)
    if inspect.isawaitable(value):
        value = asyncio.run(_await_value(value))
    with out:
        out.write("" if value is None else f"{json.dumps(value)}\n")


if __name__ == "__main__":
    main()
