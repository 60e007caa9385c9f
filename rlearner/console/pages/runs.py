"""All runs: state and newest figures, curves on one chart, differing settings."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Collection
from functools import partial
from typing import Any, Final
from urllib.parse import urlencode

from nicegui import ui
from nicegui.events import GenericEventArguments

from broker.errors import UserError
from broker.telemetry.names import find_metric
from rlearner.console.components import Chart, ChartControls, Grid, tag
from rlearner.console.index.answers import RunRow, SettingDifference
from rlearner.console.index.runs import setting_differences
from rlearner.console.pages.curves import CLOCK, curve_points, round_times
from rlearner.console.pages.frame import Page, ask, frame, link
from rlearner.console.state import ConsoleRun, ConsoleState
from rlearner.ops.listing import format_age

# What is compared, if all runs have it: the first of these.
METRICS: Final = (
    "reward/mean",
    "train/loss",
    "eval/success_rate",
    "eval/loss",
    "perf/tokens_per_s",
)
EVALUATED: Final = "eval/success_rate"
NOT_COMPARED: Final = {CLOCK, "step"}
MAX_COMPARED: Final = 8
POINTS: Final = 800
REFRESH_S: Final = 5.0
FIRST_S: Final = 3.0  # after which a live run was heard
TONES: Final = {
    "training": "live",
    "starting": "warn",
    "finished": "good",
    "broker away": "warn",
    "unreadable": "bad",
}
COLUMNS: Final[list[dict[str, Any]]] = [
    {"key": "pick", "title": "", "kind": "pick", "sort": False},
    {"key": "name", "title": "run"},
    {"key": "state", "title": "state", "kind": "pill"},
    {"key": "steps", "title": "steps", "n": True},
    {"key": "reward", "title": find_metric("reward/mean").title, "n": True},
    {"key": "success", "title": find_metric("env/success_rate").title, "n": True},
    {"key": "eval", "title": find_metric("eval/success_rate").title, "n": True},
    {"key": "loss", "title": find_metric("train/loss").title, "n": True},
    {"key": "speed", "title": find_metric("perf/tokens_per_s").title, "n": True},
    {"key": "algorithm", "title": "algorithm"},
    {"key": "domains", "title": "domains"},
    {"key": "changed", "title": "last change", "n": True},
]


async def runs_page(state: ConsoleState, compare: str, metric: str) -> None:
    page = Page(state)
    rows = await state.list.rows()
    names = {row.name for row in rows}
    compared = [name for name in compare.split(",") if name in names][:MAX_COMPARED]
    with frame(state, "Runs"):
        with tag("div", classes="head"):
            tag("h1", "Runs")
            tag("span", f"{len(rows)} in {state.root}", "dim")
            tag("span", classes="grow")
            search = {
                "placeholder": "filter ( / )",
                "type": "search",
                "data_search": "",
                "aria_label": "filter runs",
            }
            field = tag("input", classes="in", **search)
            field.on(
                "input",
                js_handler="(e) => dispatchEvent(new CustomEvent('grid-filter', {detail: "
                "e.target.value}))",
            )
        with tag("div", classes="panel"):
            table_rows = _run_rows(rows, compared)
            grid = Grid(
                "runs", COLUMNS, table_rows, filterable=True, empty=f"no runs in {state.root}"
            )

            def pick(event: GenericEventArguments) -> None:
                now = [name for name in compared if name != event.args]
                now += [] if event.args in compared else [event.args]
                ui.navigate.to(_page_address(now[-MAX_COMPARED:], metric))

            grid.on("pick", pick)
        if compared:
            await _show_comparison(state, compared, metric)
        else:
            tag("p", "Tick runs to compare their curves and settings.", "dim")

    async def again() -> None:
        grid.change(_run_rows(await state.list.rows(), compared))

    timer = ui.timer(REFRESH_S, again)
    ui.timer(FIRST_S, again, once=True)
    page.until_gone(timer.cancel)


def choose_metric(wanted: str, common: Collection[str]) -> str:
    """Return the metric to compare: the wanted one if it is among the common ones, else the first
    of ``METRICS`` that is; empty if there is none.
    """
    candidates = (wanted, *METRICS, *sorted(common))
    return next((name for name in candidates if name in common), "")


def _page_address(names: list[str], metric: str) -> str:
    query = {"compare": ",".join(names), "metric": metric}
    return "/?" + urlencode({name: text for name, text in query.items() if text}) if names else "/"


def _run_rows(rows: list[RunRow], compared: list[str]) -> list[dict[str, Any]]:
    now = time.time()
    return [
        {
            "key": row.name,
            "on": row.name in compared,
            "name": row.name,
            "name_href": link("run", row.name),
            "name_color": f"var(--c{compared.index(row.name)})" if row.name in compared else None,
            "state": row.state,
            "state_tone": TONES.get(row.state, ""),
            "steps": f"{row.step}/{row.steps}",
            "steps_sort": row.step,
            "reward": row.last.get("reward/mean"),
            "success": row.last.get("env/success_rate"),
            "eval": row.last.get("eval/success_rate"),
            "loss": row.last.get("train/loss"),
            "speed": row.last.get("perf/tokens_per_s"),
            "algorithm": row.algorithm,
            "domains": ", ".join(row.domains),
            "changed": f"{format_age(now - row.changed)} ago" if row.changed else "–",
            "changed_sort": -row.changed,
        }
        for row in sorted(rows, key=lambda row: (row.state != "training", -row.changed))
    ]


async def _show_comparison(state: ConsoleState, names_compared: list[str], wanted: str) -> None:
    """Build the curves and the differences of several runs.

    Args:
        wanted: the metric that was asked for, empty for any.
    """
    runs = dict[str, ConsoleRun]()
    for name in names_compared:
        with contextlib.suppress(UserError):
            runs[name] = state.run(name)
    metrics = dict[str, set[str]]()
    for name, run in runs.items():
        await run.settle()
        metrics[name] = set(await ask(run.queries.metric_names) or [])
    common = set.intersection(*metrics.values()) - NOT_COMPARED if metrics else set()
    metric = choose_metric(wanted, common)
    series = [
        {**line, "name": name, "color": f"var(--c{names_compared.index(name)})"}
        for name, run in runs.items()
        if (line := await _read_curve(run, metric))
    ]
    with tag("div", classes="panel"):
        _show_metric_form(names_compared, metric, common)
        if wanted and wanted != metric:
            owners = [name for name in runs if wanted in metrics[name]]
            place = f"only in {', '.join(owners)}" if owners else "in none of these runs"
            tag("p", f"{wanted} is {place}; compared is what all of them have", "dim")
        if metric:
            controls = ChartControls({"x": [], "y": []}, state.chart_view.read(), arranged=False)
            controls.on("keep", lambda event: state.chart_view.write(event.args))
            Chart(metric, series, [], height=280)
        else:
            tag("p", "no metric that all of these runs have", "dim")
    folders = [run.folder for run in runs.values()]
    if len(folders) > 1:
        differences = await asyncio.to_thread(setting_differences, folders)
        _show_differences(names_compared, differences)


async def _read_curve(run: ConsoleRun, metric: str) -> dict[str, Any]:
    """Return a run's points of a metric, with intervals if it is evaluated; empty without any."""
    lines = await ask(partial(run.queries.series, [metric, CLOCK], POINTS)) or {}
    line = lines.get(metric)
    if line is None:
        return {}
    clock = lines.get(CLOCK)
    start = clock.values[0] if clock else line.times[0]
    curve = curve_points(line) | {"times": round_times([time - start for time in line.times])}
    if metric != EVALUATED:
        return curve
    results = await ask(run.queries.evaluations) or []
    bands = {result.step: result for result in results if result.policy == "actor"}
    if not all(step in bands for step in line.steps):
        return curve
    return curve | {
        "low": [bands[step].low for step in line.steps],
        "high": [bands[step].high for step in line.steps],
        "dots": True,
    }


def _show_metric_form(compared: list[str], metric: str, metrics: Collection[str]) -> None:
    with tag("form", classes="form", method="get", action="/"):
        tag("input", type="hidden", name="compare", value=",".join(compared))
        with tag("label", "metric", "wide"):
            field = {"name": "metric", "value": metric, "list": "metrics"}
            tag("input", classes="in", data_search="", **field)
        with tag("datalist", id="metrics"):
            for name in sorted(metrics):
                tag("option", value=name)
        tag("button", "Show", "btn", type="submit")
        tag("a", "compare none", "btn", href="/")


def _show_differences(compared: list[str], differences: list[SettingDifference]) -> None:
    columns: list[dict[str, Any]] = [{"key": "setting", "title": "setting", "mono": True}]
    columns += [{"key": f"run_{i}", "title": name, "wrap": True} for i, name in enumerate(compared)]
    rows = [
        {"key": difference.key, "setting": difference.key}
        | {
            f"run_{i}": _format_value(difference.values[name]) if name in difference.values else "–"
            for i, name in enumerate(compared)
        }
        for difference in differences
    ]
    with tag("div", classes="panel"):
        tag("h2", f"Settings that differ: {len(rows)}")
        Grid("settings that differ", columns, rows, empty="the settings are the same")


def _format_value(value: Any) -> str:
    return (
        value
        if isinstance(value, str)
        else json.dumps(value, ensure_ascii=False, default=str)[:400]
    )
