"""Train tic-tac-toe by self-play and measure it against a random player.

    python -m bench.selfplay

The run is ``rlearner up configs/tictactoe.yaml``: one policy plays both seats, and every evaluation
plays a random player from either seat, greedily. The last line is one JSON object:

- ``selfplay_random_loss``: share of the games that the trained policy loses at the end, an illegal
  move being a loss; ``interval``: its 95 % interval (Wilson).
- ``loss_start``: the same before the first step; ``games``: of one evaluation.
- ``steps``, ``episodes``: trained; ``minutes``: of everything.
- ``lost``: tickets that are in no count; ``dead``: those that were closed without a group.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench.distill import episodes_of, run_up
from broker.errors import UserError
from learner.reporting.metrics import read_lines

CONFIG: Final = "configs/tictactoe.yaml"
SUCCESS: Final = "eval/domain/against_random/success_rate"
GAMES: Final = "eval/num_episodes"
Z: Final = 1.96  # standard errors of a 95 % interval
SMALL: Final = (
    "train.steps=2",
    "train.groups_per_step=2",
    "domains.game.group_size=2",
    "warm_start.steps=2",
    "warm_start.episodes=8",
    "eval.every_steps=2",
    "eval.tasks=8",
)


def wilson_interval(share: float, count: int) -> list[float]:
    """Return the 95 % interval of a share of ``count`` trials."""
    centre = (share + Z**2 / (2 * count)) / (1 + Z**2 / count)
    half = Z * math.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2)) / (1 + Z**2 / count)
    return [round(max(centre - half, 0.0), 4), round(min(centre + half, 1.0), 4)]


def summarize(rows: Sequence[dict[str, Any]], episodes_per_step: int) -> dict[str, Any]:
    """Return the figures of a run's metrics.

    Raises:
        UserError: if it has no evaluation.
    """
    evaluations = [row for row in rows if SUCCESS in row]
    if not evaluations:
        raise UserError("the run has no evaluation against a random player")
    last = evaluations[-1]
    games = int(last[GAMES])
    loss = round(1 - last[SUCCESS], 4)
    final = rows[-1]
    counts = {
        name: final[f"ticket/{name}"] for name in ("trained", "filtered", "dropped", "dead", "open")
    }
    return {
        "selfplay_random_loss": loss,
        "interval": wilson_interval(loss, games),
        "loss_start": round(1 - evaluations[0][SUCCESS], 4),
        "games": games,
        "steps": int(final["step"]),
        "episodes": int(final["step"]) * episodes_per_step,
        "lost": int(final["ticket/issued"] - sum(counts.values())),
        "dead": int(counts["dead"]),
    }


def measure(folder: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Run the recipe and return the figures."""
    began = time.monotonic()
    run_up([CONFIG, f"run.dir={folder}", "run.name=selfplay", *overrides], kills=0)
    minutes = round((time.monotonic() - began) / 60, 1)
    rows = read_lines(folder / "selfplay" / "metrics.jsonl")
    episodes = episodes_of(folder / "selfplay", "game")
    return {**summarize(rows, episodes), "minutes": minutes}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.selfplay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--small", action="store_true", help="two steps, for CI")
    parser.add_argument("--out", type=Path, default=Path("runs/selfplay"), help="folder of the run")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of the recipe")
    options = parser.parse_args()
    folder = options.out.absolute() / time.strftime("%Y%m%d-%H%M%S")
    try:
        small = SMALL if options.small else ()
        print(json.dumps(measure(folder, [*small, *options.overrides])))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
