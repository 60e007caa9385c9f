"""One run: newest figures, curves with events, evaluations with intervals, any metric."""

from __future__ import annotations

import time
from functools import partial
from typing import Any, Final

from nicegui import ui
from nicegui.element import Element

from broker.contract.wire import PlainSettings
from broker.settings.run_address import is_held
from broker.settings.run_settings import stored_domains, stored_value
from broker.telemetry.names import find_metric
from learner.run_folder import OFFLINE_LOCK
from rlearner.advise.advice import advise
from rlearner.advise.fit import NotFitted, SettingMissing, stored_settings
from rlearner.console.components import Chart, ChartControls, Grid, Stats, tag
from rlearner.console.index.answers import Event, Series
from rlearner.console.live import BrokerView
from rlearner.console.pages.curves import (
    CLOCK,
    LAYOUTS,
    Curve,
    CurveBoard,
    clock_points,
    round_times,
    round_values,
)
from rlearner.console.pages.evaluation import evaluation_series, show_evaluation
from rlearner.console.pages.frame import Page, ask, frame, index_banners
from rlearner.console.state import ConsoleRun, ConsoleState
from rlearner.ops.run_kinds import algorithm_name, is_offline, offline_value
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
OTHERS: Final = ("eval/success_rate", "eval/step", "time/step")  # of the tiles, in all layouts
SHARES: Final = ("trainer/idle_ratio", "rollouter/idle_ratio")


async def overview_page(state: ConsoleState, run: ConsoleRun, more: str) -> None:
    page = Page(state)
    queries = run.queries
    layout = LAYOUTS[run.kind]
    extra_metrics = [name for name in more.split(",") if name][:12]
    curves = (*(Curve(name, (name,)) for name in extra_metrics), *layout.curves)
    every = {CLOCK, *layout.metrics, *extra_metrics}
    read_last = partial(queries.last_values, (*layout.tiles, *OTHERS))
    question = run.remember(
        f"overview {sorted(every)}",
        lambda: (
            queries.series(sorted(every), POINTS),
            queries.events(newest=MARKS),
            queries.evaluations(),
            read_last(),
            queries.metric_names(),
        ),
    )
    lines_by_name, events, results, last, metrics = await ask(question) or ({}, [], [], {}, [])
    with frame(state, "Overview", run, "") as banners:
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
            suggestions = tag("datalist", id="metrics")
            _suggest_metrics(suggestions, metrics)
            tag("button", "Show", "btn", type="submit")
        marks = _event_marks(events)
        controls = _add_controls(state, clock_points(lines_by_name), curves)
        evaluation: Chart | None = None
        with tag("div", classes="grid") as container:
            if layout.has_evaluations:
                with tag("section", classes="panel"):
                    title = f"{find_metric('eval/success_rate').heading}, with 95 % intervals"
                    series = evaluation_series(results)
                    evaluation = Chart(title, series, marks, arranged=True, low=0, high=1)
        always = (*extra_metrics, *layout.always)
        board = CurveBoard(container, curves, always, lines=lines_by_name, marks=marks)
        if run.kind == "evaluation":
            await show_evaluation(run, results)
        with tag("section", classes="panel"):
            tag("h2", "Events")
            columns: list[dict[str, Any]] = [
                {"key": "when", "title": "when"},
                {"key": "step", "title": "step", "n": True},
                {"key": "kind", "title": "kind", "kind": "pill"},
                {"key": "text", "title": "what", "wrap": True},
            ]
            list_of_events = Grid("events", columns, _event_rows(events), empty="no events yet")
        notes = tag("div")
        _show_notes(notes, run)

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
        answer = await ask(lambda: (queries.series(sorted(every), POINTS, first), read_last()))
        fresh, last = answer or ({}, last)
        if goes_back or not set(fresh) - {CLOCK} <= board.names:
            fresh = await ask(lambda: queries.series(sorted(every), POINTS)) or {}
            if controls is not None:
                controls.run_method("set_clock", clock_points(fresh))
            board.show(fresh, _event_marks(events))
            newest = _newest_step(fresh)
            fresh = {}
        newest = max(newest, _newest_step(fresh))
        points = {
            name: [line.steps, (round_times if name == CLOCK else round_values)(line.values)]
            for name, line in fresh.items()
        }
        stats.change(_stat_tiles(run, last, run.live.view), points or None)
        refreshed_at = clock()

    async def refresh_live() -> None:
        # Else the steps bring it up to date.
        if clock() - refreshed_at > REFRESHED_S:
            stats.change(_stat_tiles(run, last, run.live.view))

    async def refresh_slowly() -> None:
        nonlocal events, results, metrics, has_changed
        refresh_banners()
        if not has_changed:
            return
        has_changed = False
        _show_notes(notes, run)
        if (names := await ask(queries.metric_names)) is not None and names != metrics:
            metrics = names
            _suggest_metrics(suggestions, metrics)
        now = await ask(lambda: queries.events(newest=MARKS))
        if now is None or now == events:
            return
        if _evaluation_events(now) != _evaluation_events(events):
            results = await ask(queries.evaluations) or results
            if evaluation is not None:
                evaluation.run_method("set", evaluation_series(results))
        events = now
        list_of_events.change(_event_rows(now))
        board.mark(_event_marks(now))

    async def refresh_limit() -> None:
        if newest <= 0 or run.kind != "training":
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


def _add_controls(
    state: ConsoleState, clock: dict[str, list[float]], curves: tuple[Curve, ...]
) -> ChartControls | None:
    """Show how the charts of these curves are shown; None without curves."""
    if not curves:
        return None
    controls = ChartControls(clock, state.chart_view.read(), arranged=True)
    controls.on("keep", lambda event: state.chart_view.write(event.args))
    return controls


def _format_subtitle(run: ConsoleRun) -> str:
    model = stored_value(run.config, "model", "path") or "small model of its own"
    if is_offline(run.kind):
        file = offline_value(run, "data", "train") or ""
        return f"{algorithm_name(run)} · {file} · {model}"
    return f"{', '.join(stored_domains(run.config))} · {model}"


def _suggest_metrics(suggestions: Element, names: list[str]) -> None:
    suggestions.clear()
    with suggestions:
        for name in names:
            tag("option", value=name, label=find_metric(name).meaning)


def _show_notes(notes: Element, run: ConsoleRun) -> None:
    """Show what the index lacks; a run without a fleet has no records to lack."""
    texts = run.follower.status().notes
    if run.kind != "training":
        texts = ()
    if texts != tuple(child._text for child in notes.default_slot.children):
        notes.clear()
        with notes:
            for text in texts:
                tag("p", text, "dim")


def _newest_step(lines: dict[str, Series]) -> int:
    """Return the newest step of these values, -1 if there are none."""
    return max([-1, *(line.steps[-1] for line in lines.values() if line.steps)])


def _stat_tiles(run: ConsoleRun, last: dict[str, float], live: BrokerView) -> list[dict[str, Any]]:
    step = run.follower.status().steps
    learner = next((presence for presence in live.processes if presence.role == "learner"), None)
    metrics = live.metrics.get("learner.learner") if learner is not None else None
    state, note, tone = _run_state(run, step, live)
    phase = metrics.text.get("phase", "") if metrics is not None else ""
    stats: list[dict[str, Any]] = [
        {"key": "state", "label": "state", "value": state, "note": phase or note, "tone": tone},
    ]
    if run.kind != "evaluation":
        note = f"of {run.steps:,}{_time_left(run, step, last)}"
        stats.append({"key": "step", "label": "step", "value": f"{step:,}", "note": note})
    for name in LAYOUTS[run.kind].tiles:
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
    if run.kind == "evaluation":
        return "evaluated", "", "good"
    if is_offline(run.kind) and is_held(run.folder, OFFLINE_LOCK):
        return "training", "", "good"
    # Those that were there before the broker went.
    if live.problem and live.processes:
        return "broker away", live.problem, "warn"
    if any(presence.role == "learner" for presence in live.processes):
        if live.desired and live.desired != "running":
            return live.desired, live.reason, "warn"
        return "training", "", "good"
    if run.steps and step >= run.steps:
        return "finished", "", "good"
    if is_offline(run.kind):
        return "not running", "", "dim"
    return "not running", live.problem or "no learner is running", "dim"


def _time_left(run: ConsoleRun, step: int, last: dict[str, float]) -> str:
    seconds = last.get("time/step")
    if seconds and 0 < step < run.steps:
        return f", {format_duration(seconds * (run.steps - step))} left"
    return ""


def _find_bottleneck(rows: list[dict[str, float]], config: PlainSettings) -> str:
    try:
        return advise(rows, stored_settings(config)).line
    except NotFitted as error:
        return f"not known: {error}"
    except (SettingMissing, KeyError, TypeError, ValueError):
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
