"""``rlearner advise``: prints what limits a run, and what changes would bring, from the run's
folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from broker.errors import UserError
from broker.settings.sections import parse
from broker.system.visible_text import visible
from learner.config import TrainSection
from learner.reporting.metrics import damage, read_lines
from learner.run_folder import find_run
from rlearner.advise import changes
from rlearner.advise.advice import Advice, advice_of, desired_servers, predict
from rlearner.advise.fit import FittedRun, NotFitted, fit
from rlearner.advise.run_model import STAGES

READ: Final = ("steps", "groups_per_step", "max_staleness")  # of train


async def advise_run(options: argparse.Namespace) -> int:
    """Print the table, or the answer to ``--simulate``; return the exit code.

    Raises:
        UserError: if a change is impossible, or the run has too few steps.
    """
    wanted = changes.parse(options.simulate) if options.simulate is not None else None
    place = find_run(options.run_name, options.dir)
    metrics = place.folder / "metrics.jsonl"
    if damaged := damage(metrics):
        print(f"warning: {damaged}", file=sys.stderr)
    train = place.config.get("train") or {}
    # it may be damaged since
    parse("train", {name: train[name] for name in READ if name in train}, TrainSection)
    try:
        run = fit(read_lines(metrics), place.config)
    except NotFitted as error:
        raise UserError(f"run {place.name}: {error}") from None
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{place.folder / 'config.yaml'}: does not hold all settings of a run ({error})"
        ) from None
    if wanted is None:
        advice = advice_of(run)
        found = advice.to_json() | {"desired_servers": desired_servers(run.model)}
        lines = table(run, advice, found["desired_servers"])
    else:
        found = simulated(run, wanted)
        lines = comparison(found)
    head = f"run {place.name}, steps {run.steps[0]} to {run.steps[1]}: {run.samples_per_s:.1f} samples/s"
    print(
        json.dumps({"run": place.name} | found)
        if options.json
        else visible("\n".join([head, *lines]), newlines=True)
    )
    return 0


def table(run: FittedRun, advice: Advice, desired: int) -> list[str]:
    """Return the lines of the table."""
    lines = [f"bottleneck: {advice.line}", "", "stage        in use   twice as fast, or as much"]
    lines += [
        f"{stage:11}  {_share(advice.busy.get(stage)):>6}   {_percent(advice.relief[stage]):>7}"
        for stage in STAGES
    ]
    width = max(len(change.text) for change in advice.changes)
    lines += ["", f"{'change':{width}}  samples/s     gain"]
    for change in advice.changes:
        lines.append(
            f"{change.text:{width}}  {change.samples_per_s:9.1f}  {_percent(change.gain):>7}"
        )
    servers = "1 server reaches" if desired == 1 else f"{desired} servers reach"
    lines += [
        "",
        f"{servers} 95 % of what any number of servers of this speed can; the run has {run.model.servers:g}.",
    ]
    lines.append(f"The model explains {1 / run.explained:.0%} of a step's time.".replace("%", " %"))
    return lines


def simulated(run: FittedRun, wanted: Mapping[str, float]) -> dict[str, Any]:
    """Return the present and the changed run, side by side."""
    then = predict(run, wanted)
    after = changes.apply(run.model, wanted)
    advice = advice_of(
        FittedRun(after, then.samples_per_s, run.step_s, {}, run.explained, run.steps)
    )
    return {
        "now": {name: changes.KEYS[name].now(run.model) for name in wanted}
        | {"samples_per_s": run.samples_per_s},
        "then": dict(wanted) | {"samples_per_s": then.samples_per_s},
        "gain": then.gain,
        "bottleneck_now": advice_of(run).bottleneck,
        "bottleneck_then": advice.bottleneck,
        "line_then": advice.line,
    }


def comparison(found: Mapping[str, Any]) -> list[str]:
    """Return the lines of the comparison."""
    now = found["now"]
    then = found["then"]
    lines = [f"{'':22}  {'now':>9}  {'then':>9}"]
    lines += [
        f"{name:22}  {now[name]:9g}  {then[name]:9g}" for name in now if name != "samples_per_s"
    ]
    gain = _percent(found["gain"])
    lines.append(
        f"{'samples/s':22}  {now['samples_per_s']:9.1f}  {then['samples_per_s']:9.1f}  {gain}"
    )
    names: Sequence[str] = [found[f"bottleneck_{when}"] or "none" for when in ("now", "then")]
    return [*lines, f"{'bottleneck':22}  {names[0]:>9}  {names[1]:>9}"]


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}".replace("%", " %")


def _percent(value: float) -> str:
    return f"{value:+.0%}".replace("%", " %")
