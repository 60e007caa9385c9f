"""The first day of a newcomer: own data, own rewards, from YAML and from Python, with real runs.

    python -m bench.first_day [PART ...]      # formats, rewards, python, notebook, view, console

Each form of data and of reward function counts if a run with it trained a step whose gradient is
not zero. The last line is one JSON object:

- ``formats``, ``reward_forms``: how many did; ``failed``: the others, and how they ended.
- ``lines_yaml``, ``lines_python``: of the smallest own task that trained, without blank lines.
- ``notebook``: whether the cells of all notebooks in examples/ run.
- ``view_cpu_share``: processor time of `rlearner up` itself / of all processes of the quickstart.
- ``console_first_visit_charts``: charts that the console shows of that run on the first visit, and
  on one after its index is complete.

The exit code is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import aiohttp

from bench.support.console_process import console
from bench.support.first_day_forms import (
    FORMATS,
    OFFLINE,
    OWN_TASK,
    PYTHON,
    REWARD_FORMS,
    write_inputs,
)
from bench.support.localhost_names import local_connector
from bench.support.notebooks import run_notebooks
from learner.reporting.metrics import read_lines

CONFIGS: Final = Path(__file__).parents[1] / "configs"
SMALL: Final = (
    "run.dir=runs",
    "train.steps=1",
    "train.groups_per_step=2",
    "domains.mine.group_size=4",
    "eval.every_steps=0",
    "trackers.use=[]",
)
SMALL_OFFLINE: Final = (
    "run.dir=runs",
    "train.steps=1",
    "train.batch_size=2",
    "data.eval_share=0",
    "eval.every_steps=0",
    "trackers.use=[]",
    "model.path=null",
    "model.tiny.vocab=chars",
)
VIEW: Final = re.compile(r"this view [\d.]+ s \(([\d.]+)%\)")


def train_once(folder: Path, run: str, command: list[str]) -> str:
    """Run a command that trains one step, and return why it does not count, empty if it does."""
    done = subprocess.run(
        [sys.executable, "-m", "rlearner.cli", *command, f"run.name={run}"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return f"exit code {done.returncode}: {done.stderr.strip()[-500:]}"
    return find_gradient(folder / "runs" / run)


def find_gradient(run: Path) -> str:
    """Return why a run's step does not count, empty if its gradient is not zero."""
    lines = list(read_lines(run / "metrics.jsonl"))
    norms = [value for line in lines for name, value in line.items() if name.endswith("/grad_norm")]
    return "" if norms and norms[-1] > 0 else f"gradient {norms[-1] if norms else 'missing'}"


def try_formats(folder: Path) -> dict[str, str]:
    """Train one step on each form of data."""
    failures = {}
    for number, (name, env_args) in enumerate(FORMATS.items()):
        arguments = f"domains.mine.env_args={json.dumps(env_args)}"
        words = ["up", "task.yaml", *SMALL, arguments]
        failures[name] = train_once(folder, f"format-{number}", words)
    for number, (name, (command, path)) in enumerate(OFFLINE.items()):
        words = [command, str(CONFIGS / f"{command}.yaml"), *SMALL_OFFLINE, f"data.train={path}"]
        failures[name] = train_once(folder, f"offline-{number}", words)
    return failures


def try_rewards(folder: Path) -> dict[str, str]:
    """Train one step with each form of reward function."""
    failures = {}
    for name in REWARD_FORMS:
        rewards = f"domains.mine.rewards=[{{name: './rewards.py:{name}'}}]"
        failures[name] = train_once(folder, f"reward-{name}", ["up", "task.yaml", *SMALL, rewards])
    return failures


def try_python(folder: Path) -> str:
    """Train one step by ``rlearner.train``."""
    done = subprocess.run(
        [sys.executable, "-c", PYTHON], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        return f"exit code {done.returncode}: {done.stderr.strip()[-500:]}"
    (run,) = (path for path in (folder / "runs").iterdir() if path.name not in known_runs(folder))
    return find_gradient(run)


def known_runs(folder: Path) -> set[str]:
    """Return the names of the runs that other parts make."""
    kinds = ("format-", "offline-", "reward-", "quickstart")
    return {path.name for path in (folder / "runs").iterdir() if path.name.startswith(kinds)}


def measure_view(folder: Path) -> tuple[str, float | None]:
    """Run the quickstart, and return why that failed and the view's share."""
    words = ["up", str(CONFIGS / "quickstart.yaml"), "run.dir=runs", "run.name=quickstart"]
    done = subprocess.run(
        [sys.executable, "-m", "rlearner.cli", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    share = VIEW.search(done.stdout)
    if done.returncode or share is None:
        return f"exit code {done.returncode}: {(done.stdout + done.stderr)[-500:]}", None
    return "", round(float(share[1]) / 100, 4)


async def count_charts(root: Path, run: str) -> list[int]:
    """Return the charts of a run's page on the first visit and once its index is complete."""
    async with (
        console(root, run) as (address, link, _),
        aiohttp.ClientSession(
            address, cookie_jar=aiohttp.CookieJar(unsafe=True), connector=local_connector()
        ) as session,
    ):
        headers = {"Accept": "text/html"}
        async with session.get(link.removeprefix(address), headers=headers) as answer:
            await answer.read()

        async def read(path: str) -> str:
            async with session.get(path, headers=headers) as answer:
                return await answer.text()

        first = await read(f"/run/{run}")
        while "being built" in await read(f"/run/{run}/timeline"):  # reading takes its time
            pass
        return [page.count("nicegui-chart") for page in (first, await read(f"/run/{run}"))]


def measure(folder: Path, parts: list[str]) -> dict[str, Any]:
    """Try the parts, and return the figures."""
    write_inputs(folder)
    figures: dict[str, Any] = {}
    failed: dict[str, str] = {}

    def count(name: str, attempt: Callable[[Path], dict[str, str]]) -> None:
        failures = attempt(folder)
        figures[name] = sum(not failure for failure in failures.values())
        failed.update({form: failure for form, failure in failures.items() if failure})

    if "formats" in parts:
        count("formats", try_formats)
    if "rewards" in parts:
        count("reward_forms", try_rewards)
        figures["lines_yaml"] = len(OWN_TASK.split("\n")) - 1
    if "python" in parts:
        count("python", lambda place: {"rlearner.train": try_python(place)})
        figures["lines_python"] = len(PYTHON.split("\n")) - 1
    if "notebook" in parts:
        count("notebook", run_notebooks)
    if "view" in parts or "console" in parts:
        failure, figures["view_cpu_share"] = measure_view(folder)
        failed |= {"quickstart": failure} if failure else {}
    if "console" in parts:
        charts = asyncio.run(count_charts(folder / "runs", "quickstart"))
        figures["console_first_visit_charts"] = charts
        failed |= {} if charts[0] == charts[1] > 0 else {"console": f"{charts} charts"}
    return figures | {"failed": failed}


def main() -> int:
    """Try the parts that are named, all by default; return 1 if anything failed."""
    names = ("formats", "rewards", "python", "notebook", "view", "console")
    parser = argparse.ArgumentParser(
        prog="python -m bench.first_day", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("parts", nargs="*", choices=[[], *names], metavar="PART")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rl-first-day-") as folder:
        figures = measure(Path(folder), options.parts or list(names))
    print(json.dumps(figures))
    return 1 if figures["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
