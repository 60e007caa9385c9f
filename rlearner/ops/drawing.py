"""``rlearner draw``: draws the pictures that ``rlearner up`` draws at its end, for any run."""

from __future__ import annotations

import argparse
import asyncio

from broker.errors import UserError
from learner.reporting.metrics import read_lines
from learner.run_folder import find_run


async def draw_run(options: argparse.Namespace) -> int:
    """Draw the pictures of a run and return the exit code.

    Raises:
        UserError: if the run has made no step yet.
    """
    from rlearner.up.artifacts import draw_rewards, render_before_and_after

    place = find_run(options.run_name, options.dir)
    lines = read_lines(place.folder / "metrics.jsonl")
    if not lines:
        raise UserError(f"run {place.name} has made no step yet, so there is nothing to draw")
    made = [draw_rewards(place.name, lines, place.folder / "reward.png"), *await asyncio.to_thread(render_before_and_after, place.folder)]
    print("\n".join(str(path) for path in made if path))
    return 0
