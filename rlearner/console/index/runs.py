"""Lists runs with their newest figures, and the settings in which several of them differ."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final

from broker.contract.wire import PlainSettings
from broker.errors import RlearnerError
from broker.nats.nats_errors import ApiError, Disconnected
from broker.settings.run_settings import stored_domains, stored_value
from learner.reporting.trackers import flatten_settings
from rlearner.console.index.answers import RunRow, SettingDifference
from rlearner.ops.listing import RunFiles, read_files, read_settings
from rlearner.ops.live_learners import ask_broker_of_runs
from rlearner.ops.run_kinds import RESULT, algorithm_name, run_kind

log = logging.getLogger(__name__)

LAST: Final = (
    "reward/mean",
    "env/success_rate",
    "eval/success_rate",
    "staleness/max",
    "perf/tokens_per_s",
    "train/loss",
)
LIST_S: Final = 3.0  # for which a list is shown again
WAIT_S: Final = 0.2  # for brokers that were never asked
# brokers at once; each holds a thread while it does not answer, and pages need threads, too
MAX_ASKED: Final = 3
UNASKED: Final = "asking"
KEPT_SETTINGS: Final = 512


class RunList:
    """The runs below a folder. Their brokers are asked in the background, so that none of them
    holds a page up.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files: list[RunFiles] = []
        # whether a run has a learner, and its broker's problem
        self._answers: dict[Path, tuple[bool, str]] = {}
        self._read_at = self._asked_at = float("-inf")
        self._reading = asyncio.Lock()
        self._few = asyncio.Semaphore(MAX_ASKED)
        self._asking: asyncio.Task[None] | None = None

    async def rows(self, wait_s: float = WAIT_S) -> list[RunRow]:
        """Return the runs, sorted by name; an unreadable one has that state.

        Args:
            wait_s: for the answers of brokers that were never asked; until they are there, the
                state is ``asking``.
        """
        now = asyncio.get_running_loop().time()
        async with self._reading:
            if now - self._read_at >= LIST_S:
                self._files = await asyncio.to_thread(_read_runs, self._root)
                self._read_at = now
        if (self._asking is None or self._asking.done()) and now - self._asked_at >= LIST_S:
            self._asking = asyncio.create_task(self._ask(self._files))
            self._asked_at = now
        if self._asking is not None and any(
            place.url and place.folder not in self._answers for place in self._files
        ):
            await asyncio.wait({self._asking}, timeout=wait_s)
        return await asyncio.to_thread(
            lambda: [_run_row(run, self._answers.get(run.folder)) for run in self._files]
        )

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    async def _ask(self, files: Sequence[RunFiles]) -> None:
        by_url: dict[str, list[RunFiles]] = defaultdict(list)
        for place in files:
            if place.url and place.run:
                by_url[place.url].append(place)
        current_folders = {place.folder for own in by_url.values() for place in own}
        self._answers = {
            folder: answer for folder, answer in self._answers.items() if folder in current_folders
        }
        await asyncio.gather(*(self._ask_one(url, own) for url, own in by_url.items()))

    async def _ask_one(self, url: str, files: Sequence[RunFiles]) -> None:
        names = list(dict.fromkeys(place.run for place in files))
        async with self._few:
            try:
                answers = await ask_broker_of_runs(url, names)
            except (RlearnerError, ApiError, Disconnected, OSError) as error:
                log.info("broker of %s: %s", ", ".join(names), error)
                answers = dict.fromkeys(names, ([], str(error)))
        self._answers |= {
            place.folder: (bool(answers[place.run][0]), answers[place.run][1]) for place in files
        }


def settings(folder: Path) -> PlainSettings:
    """Return the present settings of a run, empty if they cannot be read; not to be changed."""
    try:
        status = (folder / "config.yaml").stat()
    except OSError:
        return {}
    return _cached_settings(folder, status.st_ino, status.st_mtime_ns, status.st_size)


@lru_cache(KEPT_SETTINGS)
def _cached_settings(folder: Path, *_: int) -> PlainSettings:
    return read_settings(folder)


def _read_runs(root: Path) -> list[RunFiles]:
    return [read_files(path.parent, settings) for path in sorted(root.glob("*/config.yaml"))]


def _run_row(run: RunFiles, answer: tuple[bool, str] | None) -> RunRow:
    last = {
        name: float(run.line[name]) for name in LAST if isinstance(run.line.get(name), int | float)
    }
    model = stored_value(run.config, "model", "path") or "small model of its own"
    kind = run_kind(run)
    if kind == "evaluation":
        last |= _result_figures(run.folder)
    is_training, problem = answer or (False, "")
    state = run.state(is_training=is_training, problem=problem)
    if run.url and run.run and answer is None:
        state = UNASKED
    return RunRow(
        run.folder.name,
        str(run.folder),
        state,
        step=run.step,
        steps=run.steps,
        changed=run.changed,
        last=last,
        domains=stored_domains(run.config),
        model=str(model),
        algorithm=algorithm_name(run),
    )


def _result_figures(folder: Path) -> dict[str, float]:
    """Return the success rate of an evaluation, empty if its result cannot be read."""
    try:
        result = json.loads((folder / RESULT).read_bytes())
        return {"eval/success_rate": float(result["success_rate"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def setting_differences(folders: Sequence[Path]) -> list[SettingDifference]:
    """Return the settings in which runs differ, by dotted key, except name and folder."""
    flat = {folder.name: flatten_settings(settings(folder)) for folder in folders}
    keys = dict.fromkeys(key for settings in flat.values() for key in settings)
    differences = []
    for key in sorted(keys):
        values = {run: settings[key] for run, settings in flat.items() if key in settings}
        is_equal = len(values) == len(flat) and all(
            value == next(iter(values.values())) for value in values.values()
        )
        if not is_equal and key not in ("run.name", "run.dir"):
            differences.append(SettingDifference(key, values))
    return differences
