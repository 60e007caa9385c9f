"""Lists runs with their newest figures, and the settings in which several of them differ."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from learner.reporting.metrics import newest_line
from rlearner.console.index.answers import RunRow, SettingDifference
from rlearner.console.index.groups import settings
from rlearner.ops.listing import RunSummary, look

LAST: Final = ("reward/mean", "env/success_rate", "eval/success_rate", "staleness/max", "perf/tokens_per_s")


async def list_rows(root: Path) -> list[RunRow]:
    """Return the runs below a folder, sorted by name; an unreadable one has that state. Asks their brokers."""
    folders = await asyncio.to_thread(_folders, root)
    found = await asyncio.gather(*(look(folder, sized=False) for folder in folders))
    return list(await asyncio.gather(*(asyncio.to_thread(_row, one) for one in found)))


def _folders(root: Path) -> list[Path]:
    return sorted(path.parent for path in root.glob("*/config.yaml"))


def _row(run: RunSummary) -> RunRow:
    folder = Path(run.folder)
    config, line = settings(folder), newest_line(folder / "metrics.jsonl")
    last = {name: float(line[name]) for name in LAST if isinstance(line.get(name), int | float)}
    model = (_section(config, "model")).get("path") or "small model of its own"
    algorithm = _section(config, "algorithm")
    name = " with ".join(str(algorithm[key]) for key in ("adv_estimator", "loss") if algorithm.get(key))
    head = (run.name, run.folder, run.state, run.step, run.steps, run.changed)
    return RunRow(*head, last, sorted(_section(config, "domains")), str(model), name)


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name)
    return found if isinstance(found, dict) else {}


def setting_differences(folders: Sequence[Path]) -> list[SettingDifference]:
    """Return the settings that are not the same in all of these runs, by dotted key, except name and folder."""
    flat = {folder.name: _flat(settings(folder)) for folder in folders}
    keys = dict.fromkeys(key for one in flat.values() for key in one)
    found = []
    for key in sorted(keys):
        values = {run: one[key] for run, one in flat.items() if key in one}
        same = len(values) == len(flat) and all(value == next(iter(values.values())) for value in values.values())
        if not same and key not in ("run.name", "run.dir"):
            found.append(SettingDifference(key, values))
    return found


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
