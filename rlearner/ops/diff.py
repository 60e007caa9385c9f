"""``rlearner diff``: how two runs differ: settings, versions, code, data, models and final figures."""

from __future__ import annotations

import argparse
import hashlib
import shutil
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

import yaml

from broker.errors import UserError
from broker.system.visible_text import visible, visible_json
from learner.checkpoints.checkpoint import newest_checkpoint
from learner.reporting.metrics import read_lines
from learner.reporting.starts import read_starts
from learner.reporting.trackers import flatten
from learner.run_folder import RunPlace, find_run

Pair = tuple[Any, Any]  # of the first and the second run; None: it has no such thing
PLACE: Final = ("run.name", "run.dir")  # settings that differ always
RECORDED: Final = ("versions", "code", "data", "model")  # of starts.jsonl
FIGURES: Final = (
    "eval/success_rate", "env/success_rate", "reward/mean", "staleness/mean", "staleness/max", "trainer/idle_ratio",
    "rollouter/idle_ratio", "perf/tokens_per_s", "perf/samples_per_s", "ticket/trained", "ticket/dropped",
    "ticket/dead",
)  # fmt: skip  # of the text; --json has all
LEAST_WIDTH: Final = 12


async def diff_runs(options: argparse.Namespace) -> int:
    """Print how two runs differ and return the exit code."""
    places = find_run(options.run_name, options.dir), find_run(options.other, options.dir)
    found = compared(*places)
    if options.json:
        print(visible_json(found))
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
        print(visible("\n".join(text_of(found, width)), newlines=True))
    return 0


def compared(first: RunPlace, second: RunPlace) -> dict[str, Any]:
    """Return the differences, each as a pair, and the figures of both runs.

    ``settings``, ``versions``, ``code``, ``data`` and ``model`` have what differs by its name,
    ``same`` how many of each do not; ``not_recorded`` names runs of earlier versions, of which only
    the settings and figures are known.
    """
    sides = [_side(place) for place in (first, second)]
    found: dict[str, Any] = {"runs": [side["run"] for side in sides], "same": {}}
    found["not_recorded"] = [side["run"]["name"] for side in sides if not side["is_recorded"]]
    for name in ("settings", *RECORDED):
        one, other = (side[name] for side in sides)
        pairs = _pairs(one, other)
        found[name] = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
        found["same"][name] = len(pairs) - len(found[name])
    found["figures"] = _pairs(*(side["figures"] for side in sides))
    return found


def _side(place: RunPlace) -> dict[str, Any]:
    """Return what is compared of one run."""
    rows = read_lines(place.folder / "metrics.jsonl")
    starts = read_starts(place.folder)
    figures = {
        name: value
        for name, value in (rows[-1] if rows else {}).items()
        if name not in ("step", "time")
    }
    for row in rows:  # the newest evaluation, which not every step has
        figures |= {name: value for name, value in row.items() if name.startswith("eval/")}
    try:
        made = newest_checkpoint(place.folder / "checkpoints")
    except UserError:  # damaged
        made = None
    step = rows[-1]["step"] if rows else 0
    recorded: dict[str, Any] = starts[-1] if starts else {}
    side: dict[str, Any] = {name: dict(recorded.get(name) or {}) for name in RECORDED}
    if made is not None and starts:
        side["model"]["checkpoint"] = (
            f"step {made.step}, {_digest([part.digest for part in made.parts])}"
        )
    settings = {name: value for name, value in flatten(place.config).items() if name not in PLACE}
    run = {"name": place.name, "folder": str(place.folder), "step": step, "starts": len(starts)}
    return side | {
        "run": run,
        "settings": settings,
        "figures": figures,
        "is_recorded": bool(starts),
    }


def _digest(parts: list[str]) -> str:
    return hashlib.blake2b("".join(sorted(parts)).encode(), digest_size=16).hexdigest()


def _pairs(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Pair]:
    return {name: (one.get(name), other.get(name)) for name in sorted({*one, *other})}


def text_of(found: Mapping[str, Any], width: int = 0) -> Iterator[str]:
    """Yield the lines of the text output.

    Args:
        width: columns of the terminal, in which long values are cut; 0: nothing is cut.
    """
    names = [run["name"] for run in found["runs"]]
    rows: list[tuple[str, str, str, str]] = [("", *names, "")]
    for title in ("settings", *RECORDED):
        rows += [(title, "", "", "")] * bool(found[title])
        pairs = _without_lone_domains(found[title]) if title == "settings" else found[title]
        rows += [
            (f"  {name}", _value(pair[0]), _value(pair[1]), "") for name, pair in pairs.items()
        ]
    steps = [run["step"] for run in found["runs"]]
    rows.append(("figures", f"at step {steps[0]}", f"at step {steps[1]}", ""))
    for name in FIGURES:
        if name in found["figures"]:
            one, other = found["figures"][name]
            change = (
                f"{other - one:+.4g}"
                if isinstance(one, int | float) and isinstance(other, int | float)
                else ""
            )
            rows.append((f"  {name}", _value(one), _value(other), change))
    yield from _aligned(rows, width)
    same = ", ".join(f"{count} {name}" for name, count in found["same"].items() if count)
    yield ""
    yield f"the same: {same or 'nothing'}"
    for name in found["not_recorded"]:
        yield f"not recorded of {name}, which an earlier version started: versions, code, data, model"


def _without_lone_domains(settings: Mapping[str, Pair]) -> dict[str, Pair]:
    """Return the settings with one line for each domain that only one of the runs has: its
    environment.
    """
    lone = {
        name.removesuffix("env")
        for name, pair in settings.items()
        if _is_domain(name) and None in pair
    }
    return {
        name: pair
        for name, pair in settings.items()
        if _is_domain(name) or not any(name.startswith(prefix) for prefix in lone)
    }


def _is_domain(name: str) -> bool:
    parts = name.split(".")
    return len(parts) == 3 and parts[0] == "domains" and parts[2] == "env"


def _value(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) >= 1e-4 or not value else f"{value:g}"
    if isinstance(value, str):
        return value or "''"
    return (
        yaml.safe_dump(value, default_flow_style=True, width=10**6)
        .removesuffix("\n")
        .removesuffix("\n...")
    )


def _aligned(rows: list[tuple[str, str, str, str]], width: int) -> Iterator[str]:
    """Yield the rows in columns, with values cut so that a row fits the width."""
    columns = [max(len(row[number]) for row in rows) for number in range(4)]
    if width:
        room = max(LEAST_WIDTH, (width - columns[0] - columns[3] - 6) // 2)
        columns[1:3] = [min(columns[1], room), min(columns[2], room)]
    for row in rows:
        cells = [
            _cut(cell, column).ljust(column) for cell, column in zip(row, columns, strict=True)
        ]
        yield "  ".join(cells).rstrip()


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"
