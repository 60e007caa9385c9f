"""One run: newest figures, curves with events, evaluations with intervals, any metric."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final

from nicegui import ui

from broker.telemetry.names import find_metric
from rlearner.advise.advice import advise
from rlearner.advise.fit import NotFitted
from rlearner.console.components import Chart, Grid, Stats, tag
from rlearner.console.index.answers import EvaluationResult, Event, Series
from rlearner.console.live import BrokerView
from rlearner.console.pages.frame import Page, ask, frame, index_banners
from rlearner.console.state import ConsoleRun, ConsoleState
from rlearner.ops.status import HISTORY
from rlearner.up.live_state import format_duration

POINTS: Final = 300  # of a curve, a few hundred pixels wide
SLOWLY_S: Final = 5.0  # between looks for events and evaluations
# between looks for the bottleneck, which is simulated; the first one is after
LIMIT_S: Final = 300.0
FIRST_LIMIT_S: Final = 1.0
REFRESHED_S: Final = 1.5  # within which a page is up to date
EVENTS_SHOWN: Final = 12
MARKS: Final = 400
CURVES: Final[tuple[tuple[str, tuple[str, ...], dict[str, Any]], ...]] = (
    (find_metric("reward/mean").heading, ("reward/mean", "reward/max", "reward/min"), {}),
    (
        find_metric("env/success_rate").heading,
        ("env/success_rate", "env/valid_action_rate"),
        {"low": 0, "high": 1},
    ),
    (find_metric("staleness/mean").heading, ("staleness/mean", "staleness/max"), {"low": 0}),
    ("Idle share", ("trainer/idle_ratio", "rollouter/idle_ratio"), {"low": 0, "high": 1}),
    (find_metric("perf/tokens_per_s").heading, ("perf/tokens_per_s",), {"low": 0}),
    ("Seconds of a step", ("time/wait_for_batch", "time/train", "time/offer_weights"), {"low": 0}),
    ("Loss and KL", ("actor/pg_loss", "actor/ppo_kl", "critic/vf_loss"), {}),
    ("Entropy and gradient norm", ("actor/entropy", "actor/grad_norm"), {}),
    (
        find_metric("response_length/mean").heading,
        ("response_length/mean", "response_length/max"),
        {"low": 0},
    ),
)
TILES: Final = (
    "reward/mean",
    "env/success_rate",
    "staleness/max",
    "trainer/idle_ratio",
    "rollouter/idle_ratio",
    "perf/tokens_per_s",
    "actor/entropy",
)
LAST: Final = (*TILES, "eval/success_rate", "eval/step", "time/step")
# First on their chart, which is shown before there are values.
ALWAYS_SHOWN: Final = ("reward/mean", "env/success_rate")
SHARES: Final = ("trainer/idle_ratio", "rollouter/idle_ratio")


@dataclass
class Curve:
    """A chart and the metrics on it."""

    chart: Chart
    names: tuple[str, ...]


async def overview_page(state: ConsoleState, run: ConsoleRun, more: str) -> None:
    page = Page(state)
    queries = run.queries
    extra_metrics = [name for name in more.split(",") if name][:12]
    every = {name for _, names, _ in CURVES for name in names} | set(extra_metrics)
    question = run.remember(
        f"overview {sorted(every)}",
        lambda: (
            queries.series(sorted(every), POINTS),
            queries.events(newest=MARKS),
            queries.evaluations(),
            queries.last_values(LAST),
            queries.metric_names(),
        ),
    )
    lines_by_name, events, results, last, metrics = await ask(question) or ({}, [], [], {}, [])
    with frame(state, "Overview", run.name, "") as banners:
        refresh_banners = index_banners(run, banners)
        with tag("div", classes="head"):
            tag("h1", run.name)
            tag("span", _format_subtitle(run), "dim")
        stats = Stats(_stat_tiles(run, last, run.live.view))
        limit = tag("p", "", "dim", data_bottleneck="")
        with tag("form", classes="form", method="get"):
            with tag("label", "any metric, or several with commas", "wide"):
                search = {
                    "placeholder": "for example actor/grad_norm",
                    "list": "metrics",
                    "value": more,
                }
                tag("input", classes="in", name="metrics", data_search="", **search)
            with tag("datalist", id="metrics"):
                for name in metrics:
                    tag("option", value=name, label=find_metric(name).meaning)
            tag("button", "Show", "btn", type="submit")
        marks = _event_marks(events)
        curves: list[Curve] = []
        with tag("div", classes="grid"):
            for name in extra_metrics:
                _add_curve(curves, name, (name,), bounds={}, lines=lines_by_name, marks=marks)
            with tag("section", classes="panel"):
                title = f"{find_metric('eval/success_rate').heading}, with 95 % intervals"
                evaluation = Chart(title, _evaluation_series(results), marks, low=0, high=1)
            for title, names, bounds in CURVES:
                if any(name in lines_by_name for name in names) or names[0] in ALWAYS_SHOWN:
                    _add_curve(
                        curves, title, names, bounds=bounds, lines=lines_by_name, marks=marks
                    )
        with tag("section", classes="panel"):
            tag("h2", "Events")
            columns: list[dict[str, Any]] = [
                {"key": "when", "title": "when"},
                {"key": "step", "title": "step", "n": True},
                {"key": "kind", "title": "kind", "kind": "pill"},
                {"key": "text", "title": "what", "wrap": True},
            ]
            list_of_events = Grid("events", columns, _event_rows(events), empty="no events yet")
        notes = run.follower.status().notes
        for note in notes:
            tag("p", note, "dim")

    newest = _newest_step(lines_by_name)
    has_changed = False
    clock = time.monotonic
    refreshed_at = 0.0

    async def refresh() -> None:
        nonlocal newest, last, has_changed, refreshed_at
        has_changed = True
        # the learner resumed from an earlier checkpoint
        goes_back = run.follower.status().steps < newest
        first = 0 if goes_back else newest + 1
        answer = await ask(
            lambda: (queries.series(sorted(every), POINTS, first), queries.last_values(LAST))
        )
        fresh, last = answer or ({}, last)
        if goes_back:
            for curve in curves:
                curve.chart.run_method("set", _metric_series(curve.names, fresh))
            newest = _newest_step(fresh)
            fresh = {}
        newest = max(newest, _newest_step(fresh))
        points = {name: [line.steps, _round_values(line.values)] for name, line in fresh.items()}
        stats.change(_stat_tiles(run, last, run.live.view), points or None)
        refreshed_at = clock()

    async def refresh_live() -> None:
        # Else the steps bring it up to date.
        if clock() - refreshed_at > REFRESHED_S:
            stats.change(_stat_tiles(run, last, run.live.view))

    async def refresh_slowly() -> None:
        nonlocal events, results, has_changed
        refresh_banners()
        if not has_changed:
            return
        has_changed = False
        now = await ask(lambda: queries.events(newest=MARKS))
        if now is None or now == events:
            return
        if _evaluation_events(now) != _evaluation_events(events):
            results = await ask(queries.evaluations) or results
            evaluation.run_method("set", _evaluation_series(results))
        events = now
        list_of_events.change(_event_rows(now))
        evaluation.tell_all("marks", _event_marks(now))

    async def refresh_limit() -> None:
        if not newest:
            return
        text = await ask(lambda: _find_bottleneck(queries.newest_rows(HISTORY), run.config))
        if text and limit._text != f"bottleneck: {text}":
            limit._text = f"bottleneck: {text}"
            limit.update()

    page.until_gone(run.listen(page.soon(refresh)))
    page.until_gone(ui.timer(LIMIT_S, page.soon(refresh_limit)).cancel)
    page.until_gone(ui.timer(FIRST_LIMIT_S, page.soon(refresh_limit), once=True).cancel)
    page.until_gone(run.live.listen(page.soon(refresh_live)))
    page.until_gone(ui.timer(SLOWLY_S, page.soon(refresh_slowly)).cancel)


def _format_subtitle(run: ConsoleRun) -> str:
    domains = run.config.get("domains")
    model = (run.config.get("model") or {}).get("path") or "small model of its own"
    return f"{', '.join(sorted(domains)) if isinstance(domains, dict) else ''} · {model}"


def _add_curve(
    curves: list[Curve],
    title: str,
    names: tuple[str, ...],
    bounds: dict[str, Any],
    lines: dict[str, Series],
    marks: list[dict[str, Any]],
) -> None:
    present_names = tuple(name for name in names if name in lines) or names[:1]
    with tag("section", classes="panel"):
        curves.append(
            Curve(
                Chart(title, _metric_series(present_names, lines), marks, **bounds), present_names
            )
        )


def _metric_series(names: tuple[str, ...], lines: dict[str, Series]) -> list[dict[str, Any]]:
    """Return curves as ``chart.js`` takes them."""
    return [
        {"name": name, "x": line.steps, "y": _round_values(line.values)}
        if (line := lines.get(name))
        else {"name": name, "x": [], "y": []}
        for name in names
    ]


def _newest_step(lines: dict[str, Series]) -> int:
    return max([0, *(line.steps[-1] for line in lines.values() if line.steps)])


def _round_values(values: list[float]) -> list[float]:
    return [float(f"{value:.6g}") for value in values]


def _stat_tiles(run: ConsoleRun, last: dict[str, float], live: BrokerView) -> list[dict[str, Any]]:
    step = run.follower.status().steps
    learner = next((presence for presence in live.processes if presence.role == "learner"), None)
    metrics = live.metrics.get("learner.learner") if learner is not None else None
    state, note, tone = _run_state(run, step, live)
    phase = metrics.text.get("phase", "") if metrics is not None else ""
    stats: list[dict[str, Any]] = [
        {"key": "state", "label": "state", "value": state, "note": phase or note, "tone": tone},
        {
            "key": "step",
            "label": "step",
            "value": f"{step:,}",
            "note": f"of {run.steps:,}{_time_left(run, step, last)}",
        },
    ]
    for name in TILES:
        value = last.get(name)
        text: Any = f"{value:.0%}" if value is not None and name in SHARES else value
        stats.append({"key": name, "label": find_metric(name).title, "value": text, "note": ""})
    if "eval/success_rate" in last:
        at = f"after step {last['eval/step']:.0f}" if "eval/step" in last else ""
        stats.append(
            {
                "key": "eval",
                "label": find_metric("eval/success_rate").title,
                "value": last["eval/success_rate"],
                "note": at,
            }
        )
    if learner is not None:
        stats.append(
            {
                "key": "version",
                "label": "version",
                "value": learner.policy_version,
                "note": f"epoch {learner.epoch}",
            }
        )
    return stats


def _run_state(run: ConsoleRun, step: int, live: BrokerView) -> tuple[str, str, str]:
    # Those that were there before the broker went.
    if live.problem and live.processes:
        return "broker away", live.problem, "warn"
    if any(presence.role == "learner" for presence in live.processes):
        if live.desired and live.desired != "running":
            return live.desired, live.reason, "warn"
        return "training", "", "good"
    if run.steps and step >= run.steps:
        return "finished", "", "good"
    return "not running", live.problem or "no learner is running", "dim"


def _time_left(run: ConsoleRun, step: int, last: dict[str, float]) -> str:
    seconds = last.get("time/step")
    if seconds and 0 < step < run.steps:
        return f", {format_duration(seconds * (run.steps - step))} left"
    return ""


def _evaluation_series(results: list[EvaluationResult]) -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for result in results:
        line = rows.setdefault(
            result.policy,
            {"name": result.policy, "x": [], "y": [], "low": [], "high": [], "dots": True},
        )
        for name, value in (
            ("x", result.step),
            ("y", result.success_rate),
            ("low", result.low),
            ("high", result.high),
        ):
            line[name].append(value)
    return list(rows.values())


def _find_bottleneck(rows: list[dict[str, float]], config: dict[str, Any]) -> str:
    try:
        return advise(rows, config).line
    except NotFitted as error:
        return f"not known: {error}"
    except (KeyError, TypeError, ValueError):
        # Settings of an old or damaged run.
        return ""


def _evaluation_events(events: list[Event]) -> list[Event]:
    return [event for event in events if event.kind == "evaluation"]


def _event_marks(events: list[Event]) -> list[dict[str, Any]]:
    marked_events = [event for event in events if event.step >= 0]
    return [
        {"step": event.step, "kind": event.kind, "text": f"{event.kind}: {event.text}"[:160]}
        for event in marked_events
    ]


def _event_rows(events: list[Event]) -> list[dict[str, Any]]:
    tones = {
        "death": "bad",
        "failed": "bad",
        "epoch": "warn",
        "evaluation": "live",
        "checkpoint": "good",
    }
    rows = []
    for event in events[::-1][:EVENTS_SHOWN]:
        time_text = (
            time.strftime("%m-%d %H:%M:%S", time.localtime(event.time)) if event.time else "–"
        )
        author = f"{event.who}: " if event.who and event.who not in event.text else ""
        rows.append(
            {
                "key": f"{event.time} {event.kind} {event.text}",
                "when": ("≈ " if event.approximate else "") + time_text,
                "step": event.step if event.step >= 0 else None,
                "kind": event.kind,
                "kind_tone": tones.get(event.kind, ""),
                "text": f"{author}{event.text}",
            }
        )
    return rows
