"""A newcomer's first day, on real processes: a project of each kind, own data and rewards in the
forms of TRL and verl, a bug in the reward, a model without a chat template, two runs on two
brokers, and the first look at a run in a browser.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import console_kit as kit
import pytest
from waits import LONG_S, until

from bench.support.first_day_forms import OWN_TASK, REWARDS, ROWS, TRL_COLUMNS, VERL_COLUMNS
from bench.support.row_files import write_rows
from broker.settings.run_address import current_address
from learner.reporting.metrics import read_lines
from rlearner.new.cli import KINDS
from rlearner_text.config import TinyModel
from rlearner_text.tiny import build_tiny

LIMIT_S = 6 * LONG_S
SMALL = ("run.dir=runs", "train.steps=1", "train.groups_per_step=2", "eval.every_steps=0")
# settings with which one step of a project's small model has a gradient, or at least a step
QUICK = {
    "game": ("warm_start.steps=2",),
    "qa": ("warm_start.steps=2",),
    "tools": ("warm_start.steps=2",),
    "agent": (),
    "terminal": ("warm_start.steps=2", "warm_start.episodes=8"),
}
# of the rows of trl.jsonl, whose answer is in another column
OWN_REWARDS = """

def solved(completions, solution, **columns):
    assert solution == ["4"], solution
    return [variety(messages[-1]["content"]) for messages in completions]
"""
OWN = {
    "trl": ("trl.jsonl", TRL_COLUMNS, "solved"),
    "verl": ("verl.parquet", VERL_COLUMNS, "verl"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the newcomer works all day."""
    return tmp_path_factory.mktemp("day")


def environment(**variables: str) -> dict[str, str]:
    known = {name: text for name, text in os.environ.items() if name not in ("RL_BROKER", "RL_RUN")}
    return known | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"} | variables


def rlearner(folder: Path, *words: str, **variables: str) -> tuple[int, str, list[str]]:
    """Exit code, standard output, and the lines of errors."""
    done = subprocess.run(
        [sys.executable, "-m", "rlearner.cli", *words],
        cwd=folder,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    errors = [line for line in done.stderr.splitlines() if line.startswith(("error", "Trace"))]
    return done.returncode, done.stdout, errors


def trained(folder: Path, run: str, *words: str) -> list[dict[str, Any]]:
    """Train by ``rlearner up``, and return the lines of its metrics."""
    code, out, errors = rlearner(folder, "up", *words, *SMALL, f"run.name={run}")
    assert code == 0, (out, errors)
    return read_lines(folder / "runs" / run / "metrics.jsonl")


# -------------------------------------------------------------------------------------------------
# a project, and own data


@pytest.mark.parametrize("kind", KINDS)
def test_project_of_a_kind_is_checked_and_trains(kind: str, place: Path) -> None:
    code, out, _ = rlearner(place, "new", kind, "--kind", kind)
    assert code == 0
    steps = [line.strip() for line in out.partition("next:")[2].splitlines() if line]
    config = f"{kind}.yaml"
    assert steps == [f"cd {kind}", f"rlearner check {config}", "pytest", f"rlearner up {config}"]
    folder = place / kind
    code, out, errors = rlearner(folder, "check", config)
    assert (code, errors) == (0, [])
    assert len(out.splitlines()) <= 16
    assert out.splitlines()[-1].startswith("ok")
    assert not (folder / "runs").exists()  # a check writes nothing
    options = ("algorithm.filter_zero_variance=false", *QUICK[kind])
    (row,) = trained(folder, "first", config, *options)
    assert (row["step"], row["ticket/trained"]) == (1, 2)
    code, out, errors = rlearner(folder, "status")  # of the newest run
    assert (code, errors) == (0, [])
    assert "run first: step 1 of 1" in out


def write_task(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "task.yaml").write_text(OWN_TASK)
    (folder / "rewards.py").write_text(REWARDS + OWN_REWARDS)
    for name in ("questions.jsonl", *(file for file, _, _ in OWN.values())):
        write_rows(folder / name, [dict(ROWS[name])] * 20)


@pytest.mark.parametrize("form", OWN)
def test_rows_and_rewards_as_others_take_them(form: str, place: Path) -> None:
    folder = place / "own"
    write_task(folder)
    file, columns, reward = OWN[form]
    env_args = json.dumps({"path": file, **columns})
    words = (
        "task.yaml",
        f"domains.mine.env_args={env_args}",
        f"domains.mine.rewards=[{{name: './rewards.py:{reward}'}}]",
        "domains.mine.group_size=4",
    )
    code, out, errors = rlearner(folder, "check", *words)
    assert (code, errors) == (0, []), out
    (row,) = trained(folder, form, *words)
    assert row["actor/grad_norm"] > 0
    assert row["reward/max"] > row["reward/min"]


# -------------------------------------------------------------------------------------------------
# what goes wrong, before anything starts


def test_bug_in_the_reward_is_one_line_of_check(place: Path) -> None:
    folder = place / "bug"
    write_task(folder)
    fixed = (folder / "rewards.py").read_text()
    (folder / "rewards.py").write_text(fixed.replace("sample.response", "sample.respnse"))
    code, out, errors = rlearner(folder, "check", "task.yaml", *SMALL)
    assert code == 2, out
    (line,) = errors
    assert line.startswith("error: ")
    assert "rewards.py" in line
    assert "respnse" in line
    assert not (folder / "runs").exists()


def test_model_without_a_template_is_one_line_with_remedies(place: Path) -> None:
    folder = place / "untold"
    write_task(folder)
    sizes = TinyModel(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=16)
    build_tiny(folder / "model", sizes)
    (folder / "model" / "chat_template.jinja").unlink()
    code, out, errors = rlearner(folder, "check", "task.yaml", "model.path=model")
    assert code == 2, out
    (line,) = errors
    assert "its tokenizer has no chat template" in line
    assert "model.chat_template" in line
    settings = ("model.path=model", "model.chat_template=plain")
    code, out, errors = rlearner(folder, "check", "task.yaml", *settings)
    assert (code, errors) == (0, []), out


# -------------------------------------------------------------------------------------------------
# two runs at once, and a browser


@contextmanager
def training(folder: Path, run: str) -> Iterator[subprocess.Popen[bytes]]:
    """A run with a broker of its own, which trains until it is stopped."""
    words = ("up", "task.yaml", *SMALL, f"run.name={run}", "train.steps=100000")
    with (folder / f"{run}.log").open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "rlearner.cli", *words],
            cwd=folder,
            env=environment(),
            stdout=log,
            stderr=log,
        )
    try:
        yield child
    finally:
        if child.poll() is None:
            child.terminate()
            try:
                child.wait(LONG_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


async def test_two_runs_on_two_brokers(place: Path) -> None:
    """The variable of the first run's broker, which a shell keeps, misleads about neither."""
    folder = place / "two"
    write_task(folder)
    rows = {name: folder / "runs" / name / "metrics.jsonl" for name in ("first", "second")}
    with training(folder, "first") as first, training(folder, "second") as second:
        await until(
            lambda: (
                first.poll() is not None
                or second.poll() is not None
                or all(path.exists() and path.stat().st_size for path in rows.values())
            ),
            LIMIT_S,
        )
        assert (first.poll(), second.poll()) == (None, None), [
            (folder / f"{name}.log").read_text()[-2000:] for name in rows
        ]
        urls = {name: current_address(folder / "runs" / name) for name in rows}
        assert len(set(urls.values())) == 2
        for name in rows:
            code, out, errors = rlearner(folder, "status", name, RL_BROKER=urls["first"])
            assert code == 0, errors
            assert re.search(rf"^run {name}: step [\d,]+ of 100,?000", out, re.MULTILINE), out
            assert "--rebase" not in out + " ".join(errors)
            code, out, _ = rlearner(folder, "status", name, "--json", RL_BROKER=urls["first"])
            assert json.loads(out)["broker"] == urls[name]
        code, _, errors = rlearner(folder, "stop", "second", RL_BROKER=urls["first"])
        assert code == 0, errors
        assert second.wait(LIMIT_S) == 130
        assert first.poll() is None  # only the one that was named
        assert rlearner(folder, "stop", "first")[0] == 0
        assert first.wait(LIMIT_S) == 130
    for name in rows:
        code, out, errors = rlearner(folder, "audit", name)
        assert code == 0, (out, errors)


async def test_first_visit_in_a_browser_shows_what_the_second_does(
    place: Path, tmp_path: Path
) -> None:
    pytest.importorskip("nicegui")
    playwright = pytest.importorskip(
        "playwright.async_api", reason="needs Playwright and Chromium: make test-console"
    )
    from bench.support.console_browser import CHROMIUM, FLAGS

    folder = place / "seen"
    write_task(folder)
    trained(folder, "seen", "task.yaml")
    charts = "(all) => all.map((chart) => chart.dataset.chart)"
    async with (
        kit.console(folder / "runs", tmp_path) as console,
        playwright.async_playwright() as driver,
    ):
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        page = await browser.new_page()
        await page.goto(console.link)
        titles = []
        for _ in range(2):
            await page.goto(f"{console.address}/run/seen")
            await page.wait_for_function("window.did_handshake === true")
            await page.wait_for_selector('[data-stat="state"] >> text=finished')
            titles.append(await page.eval_on_selector_all("[data-chart]", charts))
        await browser.close()
    assert titles[0] == titles[1]
    assert {"Reward", "Success rate", "Loss and KL"} <= set(titles[0])
