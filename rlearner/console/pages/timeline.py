"""What every process did when: zoom from the whole run to one step, to see why something waited."""

from __future__ import annotations

import argparse
import time
from typing import Any, Final

from nicegui.events import GenericEventArguments

from broker.settings.arguments import natural
from rlearner.console.components import Lanes, tag
from rlearner.console.index.answers import Event, Timeline
from rlearner.console.pages.frame import Page, ask, frame, index_banners
from rlearner.console.state import ConsoleRun, ConsoleState

MAX_SPANS: Final = 1500
PIXELS: Final = 900
MARKED: Final = ("epoch", "death", "failed", "stop", "start", "evaluation")
MARKS: Final = 300
AROUND: Final = 0.05  # of a step, before and after it


async def timeline_page(state: ConsoleState, run: ConsoleRun, step: str) -> None:
    """Build the page; ``step``: the one to show, empty: the whole run."""
    page = Page(state)
    start, end = await ask(run.queries.extent) or (0.0, 0.0)
    view = await ask(lambda: step_range(run, step)) if step else None
    view_range = view or (start, max(end, start + 1.0))
    data = await _timeline_data(run, *view_range, PIXELS)
    with frame(state, "Timeline", run, "timeline") as banners:
        refresh_banners = index_banners(run, banners)
        with tag("div", classes="head"):
            tag("h1", "Timeline")
            tag("span", _format_since(data["live_since"]), "dim")
            tag("span", classes="grow")
            with tag("form", classes="form", method="get", style="margin:0"):
                with tag("label", "step"):
                    tag(
                        "input",
                        classes="in",
                        name="step",
                        value=step,
                        inputmode="numeric",
                        data_search="",
                    )
                tag("button", "Show", "btn", type="submit")
                if step:
                    tag("a", "whole run", "btn", href="?")
        if step and view is None:
            tag("p", f"no step {step} in this run", "bad", role="alert")
        with tag("section", classes="panel"):
            lanes = Lanes({**data, "view": list(view_range)}, f"/run/{run.name}", follow=not step)

    async def answer(event: GenericEventArguments) -> None:
        arguments = event.args
        first = float(arguments["start"])
        last = float(arguments["end"])
        pixels = int(arguments.get("px") or PIXELS)
        if last > first:
            lanes.run_method(
                "set", await _timeline_data(run, first, last, min(max(pixels, 100), 4000))
            )

    async def refresh() -> None:
        refresh_banners()
        lanes.run_method("grown", list(await ask(run.queries.extent) or (start, end)))

    lanes.on("range", answer)
    page.until_gone(run.listen(page.soon(refresh)))


def step_range(run: ConsoleRun, text: str) -> tuple[float, float] | None:
    """Return a little more than the time of one step, None if there is no such step."""
    try:
        step = natural(text.strip())
    except argparse.ArgumentTypeError:
        return None
    if step > run.follower.status().steps:
        return None
    end = run.queries.time_of(step)
    previous_time = run.queries.time_of(step - 1) if step > 1 else None
    if end is None:
        return None
    start = previous_time if previous_time is not None else run.queries.extent()[0]
    around = (end - start) * AROUND
    return start - around, end + around


async def _timeline_data(run: ConsoleRun, start: float, end: float, pixels: int) -> dict[str, Any]:
    empty_timeline = Timeline(start, end, [], [])
    timeline, events, extent = await ask(
        lambda: (
            run.queries.spans(start, end, (end - start) / pixels, MAX_SPANS),
            run.queries.events(start, end, MARKED, MARKS),
            run.queries.extent(),
        )
    ) or (empty_timeline, list[Event](), (start, end))
    number = {name: i for i, name in enumerate(timeline.lanes)}
    return {
        "lanes": timeline.lanes,
        "spans": [
            [
                number[span.lane],
                span.kind,
                span.start,
                span.end,
                span.seconds,
                span.count,
                span.ticket,
                span.step,
            ]
            for span in timeline.spans
        ],
        "bucket_s": timeline.bucket_s,
        "extent": list(extent),
        "marks": [
            {"time": span.time, "kind": span.kind, "text": span.text}
            for span in events
            if span.time
        ],
        "live_since": timeline.live_since,
    }


def _format_since(live_since: float) -> str:
    if not live_since:
        return "only the learner's phases are known: the console was not open while the run trained"
    time_text = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(live_since))
    return f"all processes since {time_text}; before, the learner's phases"
