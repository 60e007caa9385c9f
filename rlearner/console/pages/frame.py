"""What all pages share: header, tabs, banners, shortcuts, end of subscriptions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from typing import Any, Final, TypeVar
from urllib.parse import quote

from nicegui import background_tasks, ui
from nicegui.element import Element

from broker.errors import RlearnerError
from broker.nats.nats_errors import ApiError, Disconnected
from rlearner.console.components import banner, tag
from rlearner.console.index.database import DatabaseDamagedError, DatabaseUnavailableError
from rlearner.console.state import ConsoleRun, ConsoleState
from rlearner.ops.run_kinds import RunKind

log = logging.getLogger(__name__)

T = TypeVar("T")

TABS: Final = (
    ("", "Overview"),
    ("timeline", "Timeline"),
    ("fleet", "Fleet"),
    ("trajectories", "Trajectories"),
    ("dead-letters", "Dead letters"),
    ("actions", "Actions"),
)
DATA_PAGES: Final = ("", "timeline")  # of training from data
# The pages that have something to show, by kind of run.
PAGES: Final[Mapping[RunKind, Collection[str]]] = {
    "training": [path for path, _ in TABS],
    "evaluation": ("", "fleet"),
}
SHORTCUTS: Final = (
    ("1", "runs"),
    ("2 … 7", "the tabs of a run, from the left"),
    ("/", "search"),
    ("t", "dark or light"),
    ("?", "this list"),
    ("Tab, Enter", "links and buttons; the first Tab offers to skip to the content"),
    (
        "← → Home End",
        "chart: along the steps; episode: from token to token; timeline: earlier, later",
    ),
    ("+ − f", "on the timeline: zoom in, out, whole run"),
    ("Esc", "leave a search field, end a zoom"),
)
HEAD: Final = (
    '<link rel="stylesheet" href="/assets/console.css"><script src="/assets/console.js"></script>'
    '<script src="/assets/charts.js"></script>'
)
NO_INDEX: Final = (DatabaseUnavailableError, DatabaseDamagedError, sqlite3.Error)
WAIT_FOR_INDEX_S: Final = 2.0
# a refusal, or a broker that went away
ACTION_ERRORS: Final = (RlearnerError, ApiError, Disconnected, OSError)


class Page:
    """One open page: ends its subscriptions when the browser is gone."""

    def __init__(self, state: ConsoleState) -> None:
        self.state = state
        self.client = ui.context.client
        self._ends: list[Callable[[], None]] = []
        self.client.on_delete(self._end)

    def until_gone(self, end: Callable[[], None]) -> None:
        """Call ``end`` when the page is gone."""
        self._ends.append(end)

    def soon(self, work: Callable[[], Awaitable[None]]) -> Callable[[], None]:
        """Return a callback that runs ``work`` in the page; while it runs, further calls make it
        run once more.
        """
        waiting = running = False

        async def run() -> None:
            nonlocal waiting, running
            running = True
            try:
                while waiting and not self.client.is_deleted:
                    waiting = False
                    with self.client:
                        await work()
            except NO_INDEX as error:
                log.info("a page waits for its index: %s", error)
            finally:
                running = False

        def ask() -> None:
            nonlocal waiting
            waiting = True
            if not running and not self.client.is_deleted:
                background_tasks.create(run(), name="console page")

        return ask

    @property
    def session(self) -> str:
        """Name of the session, for the log."""
        state: dict[str, Any] = self.client.request.scope.get("state", {})
        return str(state.get("session", "?"))

    def _end(self) -> None:
        for end in self._ends:
            end()
        self._ends.clear()


def link(*parts: object) -> str:
    """Return the path of a page."""
    return "/" + "/".join(quote(str(part), safe="") for part in parts if part != "")


@contextlib.contextmanager
def frame(
    state: ConsoleState, title: str, run: ConsoleRun | None = None, tab: str | None = None
) -> Iterator[Element]:
    """Build the header and the element of the content; yield the element of the banners."""
    name = f"{title} · {run.name}" if run else title
    ui.page_title(f"{name} · rlearner")
    tag("a", "Skip to the content", "skip", href="#main")
    with tag("header", classes="top"), tag("div", classes="bar"):
        tag("a", "rlearner", "brand", href="/", data_key="1", title="all runs (1)")
        if run:
            tag("span", run.name, "runname", title=run.name)
            with tag("nav", classes="tabs", aria_label="pages of the run"):
                pages = PAGES.get(run.kind, DATA_PAGES)
                tabs = [(path, text) for path, text in TABS if path in pages]
                for number, (path, text) in enumerate(tabs, start=2):
                    if path != "actions" or state.actions:
                        attributes = {"aria_current": "page"} if path == tab else {}
                        tag(
                            "a",
                            text,
                            href=link("run", run.name, path),
                            data_key=str(number),
                            **attributes,
                        )
        with tag("div", classes="tools"):
            tag(
                "button",
                "◐",
                "icon",
                data_do="theme",
                title="dark or light (t)",
                aria_label="dark or light",
            )
            tag(
                "button",
                "?",
                "icon",
                data_do="help",
                title="shortcuts (?)",
                aria_label="keyboard shortcuts",
            )
            with tag("form", method="post", action="/logout", style="margin:0"):
                tag("button", "Log out", "icon", style="font-size:12.5px")
    with tag("dialog", id="shortcuts", aria_label="keyboard shortcuts"):
        tag("h2", "Keyboard shortcuts")
        with tag("dl", classes="kv"):
            for keys, text in SHORTCUTS:
                with tag("dt"):
                    tag("kbd", keys)
                tag("dd", text)
        with tag("form", method="dialog", style="margin-top:10px"):
            tag("button", "Close", "btn")
    with tag("main", classes="main", id="main", tabindex="-1"):
        banners = tag("div")
        yield banners


def trouble(problem: str, status: int) -> None:
    """Build a page of one line; ``status``: of the response."""
    ui.context.client.status_code = status
    with tag("main", classes="main", id="main"):
        banner(problem, "bad")
        tag("a", "all runs", "btn", href="/")


def index_banners(run: ConsoleRun, banners: Element) -> Callable[[], None]:
    """Show what is wrong with a run's index, if anything; returns what brings that up to date."""
    texts: list[tuple[str, str]] = []

    def refresh() -> None:
        now = index_lines(run)
        if now == texts:
            return
        texts[:] = now
        banners.clear()
        with banners:
            for text, tone in now:
                banner(text, tone)

    refresh()
    return refresh


def index_lines(run: ConsoleRun) -> list[tuple[str, str]]:
    """Return the lines about a run's index, with their tones."""
    status = run.follower.status()
    lines = []
    if status.state == "gone":
        lines.append(
            (
                f"{status.problem}: the run was moved or deleted; shown is what was indexed before",
                "bad",
            )
        )
    elif status.problem:
        lines.append((status.problem, "bad"))
    if status.state in ("building", "rebuilding") and status.done < 1.0:
        activity = (
            "rebuilt, because it was damaged" if status.state == "rebuilding" else "being built"
        )
        lines.append(
            (
                f"the index of this run is {activity}: {status.done:.0%}; until then not "
                "everything is shown",
                "info",
            )
        )
    return lines


async def ask(question: Callable[[], T]) -> T | None:
    """Return the index's answer; None if there is no index after a short wait."""
    deadline = asyncio.get_running_loop().time() + WAIT_FOR_INDEX_S
    while True:
        try:
            return await asyncio.to_thread(question)
        except NO_INDEX:
            if asyncio.get_running_loop().time() > deadline:
                return None
            await asyncio.sleep(0.05)


async def perform(output: Element, button: Element | None, lines: Callable[[], Any]) -> None:
    """Run an action, writing its lines into ``output``; an error is one line."""
    output.clear()
    if button is not None:
        button._props["disabled"] = True
        button.update()
    try:
        async for line in lines():
            with output:
                tag("div", line)
    except ACTION_ERRORS as error:
        with output:
            tag("div", " ".join(str(error).split()), "bad", role="alert")
    finally:
        if button is not None:
            button._props.pop("disabled", None)
            button.update()
