"""``rlearner diff``: how two runs differ, from settings and versions to final figures."""

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
from learner.reporting.trackers import flatten_settings
from learner.run_folder import RunPlace, find_run

# Values of the first and the second run; None: it has no such thing.
Pair = tuple[Any, Any]
# Settings that always differ.
PLACE: Final = ("run.name", "run.dir")
# Keys of starts.jsonl.
RECORDED: Final = ("versions", "code", "data", "model")
# Figures of the text; --json has all.
FIGURES: Final = (
    "eval/success_rate", "env/success_rate", "reward/mean", "staleness/mean", "staleness/max",
    "trainer/idle_ratio", "rollouter/idle_ratio", "perf/tokens_per_s", "perf/samples_per_s",
    "ticket/trained", "ticket/dropped", "ticket/dead",
)  # fmt: skip
# A narrower column would cut every path and model name to nothing.
LEAST_WIDTH: Final = 12


async def diff_runs(options: argparse.Namespace) -> int:
    """Print how two runs differ and return the exit code."""
    first = find_run(options.run_name, options.dir)
    second = find_run(options.other, options.dir)
    comparison = _compare_runs(first, second)
    if options.json:
        print(visible_json(comparison))
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
        print(visible("\n".join(text_of(comparison, width)), newlines=True))
    return 0


def _compare_runs(first: RunPlace, second: RunPlace) -> dict[str, Any]:
    """Return the differences, each as a pair, and the figures of both runs.

    ``settings``, ``versions``, ``code``, ``data`` and ``model`` have what differs by its name,
    ``same`` how many of each do not; ``not_recorded`` names runs of earlier versions, of which only
    the settings and figures are known.
    """
    sides = [_read_side(place) for place in (first, second)]
    comparison: dict[str, Any] = {"runs": [side["run"] for side in sides], "same": {}}
    comparison["not_recorded"] = [side["run"]["name"] for side in sides if not side["is_recorded"]]
    for name in ("settings", *RECORDED):
        pairs = _pair_values(sides[0][name], sides[1][name])
        comparison[name] = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
        comparison["same"][name] = len(pairs) - len(comparison[name])
    comparison["figures"] = _pair_values(sides[0]["figures"], sides[1]["figures"])
    return comparison


def _read_side(place: RunPlace) -> dict[str, Any]:
    """Return what is compared of one run."""
    rows = read_lines(place.folder / "metrics.jsonl")
    starts = read_starts(place.folder)
    last = rows[-1] if rows else {}
    figures = {name: value for name, value in last.items() if name not in ("step", "time")}
    # The newest evaluation is wanted, which not every step has.
    for row in rows:
        figures |= {name: value for name, value in row.items() if name.startswith("eval/")}
    try:
        newest = newest_checkpoint(place.folder / "checkpoints")
    except UserError:  # damaged
        newest = None
    step = last.get("step", 0)
    recorded: dict[str, Any] = starts[-1] if starts else {}
    side: dict[str, Any] = {name: dict(recorded.get(name) or {}) for name in RECORDED}
    if newest is not None and starts:
        digest = _combine_digests([part.digest for part in newest.parts])
        side["model"]["checkpoint"] = f"step {newest.step}, {digest}"
    settings = {
        name: value for name, value in flatten_settings(place.config).items() if name not in PLACE
    }
    run = {"name": place.name, "folder": str(place.folder), "step": step, "starts": len(starts)}
    return side | {
        "run": run,
        "settings": settings,
        "figures": figures,
        "is_recorded": bool(starts),
    }


def _combine_digests(parts: list[str]) -> str:
    return hashlib.blake2b("".join(sorted(parts)).encode(), digest_size=16).hexdigest()


def _pair_values(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Pair]:
    return {name: (first.get(name), second.get(name)) for name in sorted({*first, *second})}


def text_of(comparison: Mapping[str, Any], width: int = 0) -> Iterator[str]:
    """Yield the lines of the text output.

    Args:
        width: columns of the terminal, in which long values are cut; 0: nothing is cut.
    """
    names = [run["name"] for run in comparison["runs"]]
    rows: list[tuple[str, str, str, str]] = [("", *names, "")]
    for title in ("settings", *RECORDED):
        rows += [(title, "", "", "")] * bool(comparison[title])
        pairs = (
            _without_lone_domains(comparison[title]) if title == "settings" else comparison[title]
        )
        rows += [
            (f"  {name}", _format_value(pair[0]), _format_value(pair[1]), "")
            for name, pair in pairs.items()
        ]
    steps = [run["step"] for run in comparison["runs"]]
    rows.append(("figures", f"at step {steps[0]}", f"at step {steps[1]}", ""))
    for name in FIGURES:
        if name in comparison["figures"]:
            first, second = comparison["figures"][name]
            change = ""
            if isinstance(first, int | float) and isinstance(second, int | float):
                change = f"{second - first:+.4g}"
            rows.append((f"  {name}", _format_value(first), _format_value(second), change))
    yield from _align_rows(rows, width)
    counts = ", ".join(f"{count} {name}" for name, count in comparison["same"].items() if count)
    yield ""
    yield f"the same: {counts or 'nothing'}"
    for name in comparison["not_recorded"]:
        yield (
            f"not recorded of {name}, which an earlier version started: versions, code, data, model"
        )


def _without_lone_domains(settings: Mapping[str, Pair]) -> dict[str, Pair]:
    """Return the settings; of a domain that only one run has, its environment alone."""
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


def _format_value(value: Any) -> str:
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


def _align_rows(rows: list[tuple[str, str, str, str]], width: int) -> Iterator[str]:
    """Yield the rows in columns, with values cut so that a row fits the width."""
    columns = [max(len(row[number]) for row in rows) for number in range(4)]
    if width:
        room = max(LEAST_WIDTH, (width - columns[0] - columns[3] - 6) // 2)
        columns[1:3] = [min(columns[1], room), min(columns[2], room)]
    for row in rows:
        cells = [
            _cut_text(cell, column).ljust(column) for cell, column in zip(row, columns, strict=True)
        ]
        yield "  ".join(cells).rstrip()


def _cut_text(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    return f"{text[: width - 1]}…"
