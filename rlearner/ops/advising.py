"""``rlearner advise``: prints what limits a run, and what changes would bring."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from broker.errors import UserError
from broker.settings.run_settings import stored_value
from broker.settings.sections import parse
from broker.system.visible_text import visible
from learner.config import TrainSection
from learner.reporting.metrics import describe_damage, read_lines
from learner.run_folder import find_run
from rlearner.advise import changes
from rlearner.advise.advice import (
    PROCESSES,
    Advice,
    advice_of,
    describe_host,
    desired_servers,
    is_full,
    predict_change,
)
from rlearner.advise.fit import (
    TRAIN_SETTINGS,
    FittedRun,
    NotFitted,
    SettingMissing,
    fit_run,
    stored_settings,
)
from rlearner.advise.run_model import STAGES


async def advise_run(options: argparse.Namespace) -> int:
    """Print the table, or the answer to ``--simulate``; return the exit code.

    Raises:
        UserError: if a change is impossible, or the run has too few steps.
    """
    requested = None
    # A wrong argument is reported before the run is read.
    if options.simulate is not None:
        requested = changes.parse_changes(options.simulate)
    place = find_run(options.run_name, options.dir)
    metrics = place.folder / "metrics.jsonl"
    if damaged := describe_damage(metrics):
        print(f"warning: {damaged}", file=sys.stderr)
    # The file may have been damaged since it was written.
    values = {name: stored_value(place.config, "train", name) for name in TRAIN_SETTINGS}
    present_values = {name: value for name, value in values.items() if value is not None}
    parse("train", present_values, TrainSection)
    try:
        run = fit_run(read_lines(metrics), stored_settings(place.config))
    except NotFitted as error:
        raise UserError(f"run {place.name}: {error}") from None
    except SettingMissing as error:
        raise UserError(
            f"{place.folder / 'config.yaml'}: does not hold all settings of a run ({error})"
        ) from None
    if requested is None:
        advice = advice_of(run)
        answer = advice.to_json() | {"desired_servers": desired_servers(run.model)}
        lines = _advice_table(run, advice, answer["desired_servers"])
    else:
        answer = _simulate_changes(run, requested)
        lines = _comparison_lines(answer)
    if options.json:
        print(json.dumps({"run": place.name} | answer))
        return 0
    first, last = run.steps
    head = f"run {place.name}, steps {first} to {last}: {run.samples_per_s:.1f} samples/s"
    print(visible("\n".join([head, *lines]), newlines=True))
    return 0


def _advice_table(run: FittedRun, advice: Advice, desired: int) -> list[str]:
    """Return the lines of the table."""
    lines = [f"bottleneck: {advice.line}", "", "stage        in use   twice as fast, or as much"]
    for stage in STAGES:
        in_use = _format_share(advice.busy.get(stage))
        relief = "" if advice.is_rough else _format_percent(advice.relief[stage])
        lines.append(f"{stage:11}  {in_use:>6}   {relief:>7}".rstrip())
    if run.host is not None:
        lines += ["", f"On the learner's host {describe_host(run.host)}."]
    explained = f"The model explains {1 / run.explained:.0%} of a step's time".replace("%", " %")
    if advice.is_rough:
        return [*lines, "", f"{explained}, so it predicts no gains."]
    width = max(len(change.text) for change in advice.changes)
    lines += ["", f"{'change':{width}}  samples/s     gain"]
    for change in advice.changes:
        lines.append(
            f"{change.text:{width}}  {change.samples_per_s:9.1f}  {_format_percent(change.gain):>7}"
        )
    servers = f"{desired} servers reach"
    if desired == 1:
        servers = "1 server reaches"
    place = ""
    if run.host is not None and is_full(run.host) and desired > run.model.servers:
        place = ", each with processors of its own"
    lines += [
        "",
        f"{servers} 95 % of what any number of servers of this speed can{place}; "
        f"the run has {run.model.servers:g}.",
    ]
    return [*lines, f"{explained}."]


def _simulate_changes(run: FittedRun, requested: Mapping[str, float]) -> dict[str, Any]:
    """Return the present and the changed run, side by side."""
    prediction = predict_change(run, requested)
    # Its measured idle shares are those of the present run.
    changed_run = replace(
        run,
        model=changes.apply_changes(run.model, requested),
        samples_per_s=prediction.samples_per_s,
        idle={},
    )
    advice = advice_of(changed_run)
    return {
        "now": {name: changes.KEYS[name].now(run.model) for name in requested}
        | {"samples_per_s": run.samples_per_s},
        "then": dict(requested) | {"samples_per_s": prediction.samples_per_s},
        "gain": prediction.gain,
        "bottleneck_now": advice_of(run).bottleneck,
        "bottleneck_then": advice.bottleneck,
        "line_then": advice.line,
        "notes": _simulation_notes(run, requested),
    }


def _simulation_notes(run: FittedRun, requested: Mapping[str, float]) -> list[str]:
    """Return what the predicted gain of a simulated change takes for granted."""
    notes = []
    if run.host is not None and is_full(run.host) and PROCESSES & requested.keys():
        notes.append(
            f"The learner's host is full ({describe_host(run.host)}): "
            "the gain needs processes on another host."
        )
    if advice_of(run).is_rough:
        share = f"{1 / run.explained:.0%}".replace("%", " %")
        notes.append(f"The model explains {share} of a step's time: the gain is rough.")
    return notes


def _comparison_lines(answer: Mapping[str, Any]) -> list[str]:
    """Return the lines of the comparison."""
    present = answer["now"]
    changed = answer["then"]
    lines = [f"{'':22}  {'now':>9}  {'then':>9}"]
    lines += [
        f"{name:22}  {present[name]:9g}  {changed[name]:9g}"
        for name in present
        if name != "samples_per_s"
    ]
    rates = f"{present['samples_per_s']:9.1f}  {changed['samples_per_s']:9.1f}"
    lines.append(f"{'samples/s':22}  {rates}  {_format_percent(answer['gain'])}")
    stages = [answer["bottleneck_now"] or "none", answer["bottleneck_then"] or "none"]
    return [*lines, f"{'bottleneck':22}  {stages[0]:>9}  {stages[1]:>9}", *answer["notes"]]


def _format_share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}".replace("%", " %")


def _format_percent(value: float) -> str:
    return f"{value:+.0%}".replace("%", " %")
