"""All runs: state and newest figures, curves on one chart, differing settings."""

from __future__ import annotations

import asyncio
import json
import time
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from nicegui import ui
from nicegui.events import GenericEventArguments

from broker.errors import UserError
from broker.telemetry.names import find_metric
from rlearner.console.components import Chart, Grid, tag
from rlearner.console.index.answers import RunRow, SettingDifference
from rlearner.console.index.runs import setting_differences
from rlearner.console.pages.frame import Page, ask, frame, link
from rlearner.console.state import ConsoleState
from rlearner.ops.listing import format_age

METRIC: Final = "reward/mean"
LOSS: Final = "train/loss"
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
    metric = metric or _default_metric([row for row in rows if row.name in compared])
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


def _default_metric(rows: list[RunRow]) -> str:
    """Return the loss if all of these runs train from data, else the reward."""
    return LOSS if rows and all(LOSS in row.last for row in rows) else METRIC


def _page_address(names: list[str], metric: str) -> str:
    return "/?" + urlencode({"compare": ",".join(names), "metric": metric}) if names else "/"


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


async def _show_comparison(state: ConsoleState, names_compared: list[str], metric: str) -> None:
    """Build the curves and the differences of several runs."""
    series = []
    names = set[str]()
    folders = list[Path]()
    for number, name in enumerate(names_compared):
        try:
            run = state.run(name)
        except UserError:
            continue
        folders.append(run.folder)
        await run.settle()
        series_by_name = await ask(partial(run.queries.series, [metric], POINTS)) or {}
        names |= set(await ask(run.queries.metric_names) or [])
        if (line := series_by_name.get(metric)) is not None:
            series.append(
                {"name": name, "x": line.steps, "y": line.values, "color": f"var(--c{number})"}
            )
    with tag("div", classes="panel"):
        with tag("form", classes="form", method="get", action="/"):
            tag("input", type="hidden", name="compare", value=",".join(names_compared))
            with tag("label", "metric", "wide"):
                tag(
                    "input",
                    classes="in",
                    name="metric",
                    value=metric,
                    list="metrics",
                    data_search="",
                )
            with tag("datalist", id="metrics"):
                for metric_name in sorted(names):
                    tag("option", value=metric_name)
            tag("button", "Show", "btn", type="submit")
            tag("a", "compare none", "btn", href="/")
        Chart(metric, series, [], height=280)
        if len(series) < len(names_compared):
            missing = [
                name for name in names_compared if name not in {line["name"] for line in series}
            ]
            tag("p", f"without {metric}: {', '.join(missing)}", "dim")
    if len(folders) > 1:
        _show_differences(names_compared, await asyncio.to_thread(setting_differences, folders))


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
