"""``rlearner replay``: trains again from the archive, and compares each step with the run."""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Any, Final

from broker.errors import UserError
from broker.settings.run_settings import RunSettings
from broker.settings.runspec import check_settings, load
from broker.system.visible_text import visible
from learner.reporting.metrics import read_lines
from learner.run_folder import RunPlace, find_run
from rlearner.replay.compare import ReplayComparison
from rlearner.replay.output import ReplayOutput, free_folder
from rlearner.replay.overrides import changed_settings
from rlearner.replay.run import ReplayTraining
from rlearner.replay.start import find_start

FIGURES: Final = ("actor/pg_loss", "actor/entropy", "actor/ppo_kl", "actor/grad_norm", "actor/lr")


async def replay_run(options: argparse.Namespace) -> int:
    """Replay the run and return the exit code."""
    place = find_run(options.run_name, options.dir)
    first, last = _check_range(options, place)
    settings, changed = _replay_settings(options, place)
    start = find_start(place.folder, place.settings, first)
    begin = 0
    source: str | Path = start.first_path
    if start.resumed:
        begin = start.resumed.step
        source = start.resumed.path

    def say(text: str) -> None:
        if not options.json:
            print(visible(text, newlines=True), flush=True)

    check = ReplayComparison(place.folder)
    with ExitStack() as stack:
        out = None
        if changed or options.out:
            folder = Path(options.out or free_folder(place.folder))
            out = ReplayOutput(folder, settings)
            stack.callback(out.close)
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rlearner-replay-")))
        say(f"run {place.name}: from {source} (step {begin}) to step {last}")
        work = ReplayTraining(place.folder, settings, start)
        async with aclosing(work.steps(last)) as steps:
            async for replayed in steps:
                if out is not None:
                    out.write(replayed)
                if changed:
                    say(check.compared_with(replayed, FIGURES))
                else:
                    # The run's checkpoint of the step, if it kept one, has tensors to compare.
                    has_checkpoint = replayed.step in check.checkpoints
                    path = await work.save(scratch) if has_checkpoint else None
                    say(check.step(replayed, path))
                if out is not None and replayed.step == last:
                    await work.save(out.checkpoints)
    if options.json:
        figures = {
            "run": place.name,
            "from": begin,
            "to": last,
            "out": str(out.folder) if out else None,
            "overrides": changed,
        }
        print(json.dumps(figures if changed else {**figures, **check.figures()}))
    elif changed and out:
        say(f"trained {last - begin} steps on the records of {place.name} into {out.folder}")
    else:
        say(check.summary())
    return 0 if check.identical else 1


def _check_range(options: argparse.Namespace, place: RunPlace) -> tuple[int, int]:
    rows = read_lines(place.folder / "metrics.jsonl")
    newest = max((int(row["step"]) for row in rows), default=0)
    if not 0 <= options.first < options.last <= newest:
        raise UserError(
            f"--from {options.first} --to {options.last}: "
            f"expected 0 <= from < to <= {newest}, as run {place.name} has made"
        )
    return options.first, options.last


def _replay_settings(
    options: argparse.Namespace, place: RunPlace
) -> tuple[RunSettings, dict[str, Any]]:
    """Return the settings to train with, and the user's changes."""
    if not options.overrides:
        return place.settings, {}
    settings = check_settings(load(str(place.folder / "config.yaml"), options.overrides))
    return settings, changed_settings(check_settings(place.config), settings)
