"""The web application: pages and files, without login and server; ``server`` adds those."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from fastapi import FastAPI, Request
from nicegui import Client, ui
from nicegui import app as nicegui_app
from nicegui.page import page as page_of
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from broker.errors import UserError
from rlearner.console.pages.dead_letters import dead_letters_page
from rlearner.console.pages.fleet import fleet_page
from rlearner.console.pages.frame import HEAD, trouble
from rlearner.console.pages.group import group_page
from rlearner.console.pages.operate import actions_page
from rlearner.console.pages.overview import overview_page
from rlearner.console.pages.runs import runs_page
from rlearner.console.pages.timeline import timeline_page
from rlearner.console.pages.trajectories import trajectories_page
from rlearner.console.state import ConsoleRun, ConsoleState

WEB: Final = Path(__file__).parent / "web"
# For a page whose run has to load a tokenizer first.
BUILD_S: Final = 20.0
# For which a page without a connection is kept.
RECONNECT_S: Final = 5.0
SHOWN_PATH: Final = 120  # characters
QUERY: Final = (
    "text",
    "domain",
    "server",
    "hub",
    "min_step",
    "max_step",
    "min_reward",
    "max_reward",
    "min_version",
    "max_version",
    "ticket",
    "success",
    "state",
    "order",
    "after",
)

Content = Callable[[ConsoleState, ConsoleRun, Request], Awaitable[None]]


def register(state: ConsoleState) -> None:
    """Register the pages, once in a process."""

    @ui.page("/", title="rlearner", response_timeout=BUILD_S)
    async def runs(compare: str = "", metric: str = "") -> None:
        await runs_page(state, compare, metric)

    async def overview(state: ConsoleState, run: ConsoleRun, request: Request) -> None:
        await overview_page(state, run, request.query_params.get("metrics", ""))

    async def timeline(state: ConsoleState, run: ConsoleRun, request: Request) -> None:
        await timeline_page(state, run, request.query_params.get("step", ""))

    async def fleet(state: ConsoleState, run: ConsoleRun, request: Request) -> None:
        await fleet_page(state, run, request.query_params.get("log", ""))

    async def trajectories(state: ConsoleState, run: ConsoleRun, request: Request) -> None:
        await trajectories_page(
            state, run, {name: request.query_params.get(name, "") for name in QUERY}
        )

    async def dead(state: ConsoleState, run: ConsoleRun, request: Request) -> None:
        await dead_letters_page(state, run)

    async def actions(state: ConsoleState, run: ConsoleRun, request: Request) -> None:
        await actions_page(state, run)

    pages: dict[str, Content] = {
        "": overview,
        "/timeline": timeline,
        "/fleet": fleet,
        "/trajectories": trajectories,
        "/dead-letters": dead,
    }
    if state.actions:
        pages["/actions"] = actions
    for path, content in pages.items():
        _register_page(state, path, content)

    @ui.page("/run/{name}/group/{ticket}", title="rlearner", response_timeout=BUILD_S)
    async def group(name: str, ticket: str, request: Request) -> None:
        if (run := _find_run(state, name)) is None:
            return
        if not ticket.isascii() or not ticket.isdigit() or len(ticket) > 15:
            trouble(f"ticket {ticket[:40]!r}: use a number", 404)
            return
        query = request.query_params
        await run.settle()
        await group_page(
            state, run, int(ticket), query.get("colour", "logprob"), query.get("episode", "")
        )


async def _answer_missing(request: Request, error: HTTPException) -> Response:
    """Answer a request for an address without a page by a page that says so."""
    with Client(page_of("", title="rlearner"), request=request) as client:
        trouble(f"no page {request.url.path[:SHOWN_PATH]!r} in this console", 404)
    return client.build_response(request, 404)


def _register_page(state: ConsoleState, path: str, content: Content) -> None:
    @ui.page(f"/run/{{name}}{path}", title="rlearner", response_timeout=BUILD_S)
    async def page(name: str, request: Request) -> None:
        if (run := _find_run(state, name)) is not None:
            await run.settle()
            await content(state, run, request)


def _find_run(state: ConsoleState, name: str) -> ConsoleRun | None:
    """Return the run of a page; if there is none, build the page that says so."""
    try:
        return state.run(name)
    except UserError as error:
        trouble(" ".join(str(error).split()), 404)
        return None


def make_app(state: ConsoleState) -> Any:
    outer = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    outer.mount("/assets", StaticFiles(directory=WEB))
    ui.add_head_html(HEAD, shared=True)
    nicegui_app.add_exception_handler(404, _answer_missing)  # type: ignore[arg-type]
    register(state)
    # files are compressed by the server, if at all; without Tailwind, whose compiler would run in
    # the browser
    ui.run_with(
        outer,
        title="rlearner",
        language="en-US",
        dark=None,
        tailwind=False,
        binding_refresh_interval=None,
        reconnect_timeout=RECONNECT_S,
        gzip_middleware_factory=None,
        show_welcome_message=False,
        favicon=WEB / "icon.svg",
    )
    return outer
