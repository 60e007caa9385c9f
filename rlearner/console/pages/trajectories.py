"""Trajectories by step, domain, reward, version and words."""

from __future__ import annotations

import math
from typing import Any, Final, get_args
from urllib.parse import urlencode

from broker.errors import UserError
from broker.settings.run_settings import stored_value
from rlearner.console.components import Grid, banner, tag
from rlearner.console.index.answers import Order, TrajectoryFilter, TrajectoryPage
from rlearner.console.pages.frame import ask, frame, index_banners, link
from rlearner.console.state import ConsoleRun, ConsoleState

LIMIT: Final = 50
ORDERS: Final = {
    "newest": "newest first",
    "oldest": "oldest first",
    "reward_high": "highest reward",
    "reward_low": "lowest reward",
    "longest": "longest",
    "shortest": "shortest",
    "most_turns": "most turns",
    "stalest": "stalest",
}
NUMBERS: Final = (
    ("min_step", "from step", int),
    ("max_step", "to step", int),
    ("min_reward", "reward from", float),
    ("max_reward", "reward to", float),
    ("min_version", "version from", int),
    ("max_version", "version to", int),
    ("ticket", "ticket", int),
)
STATES: Final = ("trained", "filtered", "dropped", "dead", "arrived", "duplicate")
COLUMNS: Final[list[dict[str, Any]]] = [
    {"key": "what", "title": "ticket / episode"},
    {"key": "step", "title": "step", "n": True},
    {"key": "domain", "title": "domain"},
    {"key": "reward", "title": "reward", "n": True},
    {"key": "solved", "title": "solved"},
    {"key": "turns", "title": "turns", "n": True},
    {"key": "tokens", "title": "sampled", "n": True},
    {"key": "versions", "title": "versions", "n": True},
    {"key": "state", "title": "state"},
    {"key": "end", "title": "end"},
    {"key": "prompt", "title": "prompt", "wrap": True},
    {"key": "preview", "title": "last response", "wrap": True},
]


async def trajectories_page(state: ConsoleState, run: ConsoleRun, query: dict[str, str]) -> None:
    """Build the page for a query of its form."""
    selection, problem = parse(query)
    order: Order = "newest"
    if query.get("order") in get_args(Order):
        order = query["order"]  # type: ignore[assignment]
    cursor = query.get("after", "")
    page = TrajectoryPage([])
    domains = list[str]()
    if not problem:
        try:
            page, domains = await ask(
                lambda: (run.queries.search(selection, order, LIMIT, cursor), run.queries.domains())
            ) or (page, domains)
        except UserError as error:
            problem = " ".join(str(error).split())
    with frame(state, "Trajectories", run, "trajectories") as banners:
        index_banners(run, banners)
        if problem:
            banner(problem, "bad")
        with tag("div", classes="head"):
            tag("h1", "Trajectories")
            tag("span", f"{run.follower.status().trajectories:,} in the index", "dim")
        _show_form(query, domains, order)
        with tag("section", classes="panel"):
            empty_text = "nothing matches" if any(query.values()) else _why_none(run)
            Grid("trajectories", COLUMNS, rows_of(run, page), empty=empty_text)
        with tag("div", classes="form"):
            if cursor:
                tag("a", "first page", "btn", href=_page_address(query, ""))
            if page.after:
                tag("a", "next page", "btn", href=_page_address(query, page.after), rel="next")


def _why_none(run: ConsoleRun) -> str:
    if run.kind != "training":
        return "this run has none"
    is_keeping = stored_value(run.config, "samples", "keep")
    return "none yet" if is_keeping else "this run keeps none: set samples.keep=true"


def parse(query: dict[str, str]) -> tuple[TrajectoryFilter, str]:
    """Return the filter of a query, and what is wrong with it in one line, empty if nothing is."""
    values: dict[str, Any] = {
        name: query[name] for name in ("text", "domain", "server", "hub") if query.get(name)
    }
    for name, label, kind in NUMBERS:
        text = query.get(name, "").strip()
        if not text:
            continue
        try:
            values[name] = kind(text)
        except ValueError:
            values[name] = math.nan
        if not math.isfinite(values[name]) or abs(values[name]) > 2**53:
            return TrajectoryFilter(), f"{label}: {text[:40]!r} is not allowed; use a number"
    if query.get("success") in ("yes", "no"):
        values["success"] = query["success"] == "yes"
    if query.get("state") in STATES:
        values["state"] = query["state"]
    return TrajectoryFilter(**values), ""


def rows_of(run: ConsoleRun, page: TrajectoryPage) -> list[dict[str, Any]]:
    """Return the table of a page of trajectories."""
    return [
        {
            "key": str(row.id),
            "what": f"{row.ticket} / {row.episode}",
            "what_href": f"{link('run', run.name, 'group', row.ticket)}#episode-{row.episode}",
            "what_sort": row.seq * 1000 + row.ordinal,
            "step": row.step or None,
            "domain": row.domain,
            "reward": row.reward,
            "solved": "yes" if row.success else "no",
            "solved_tone": "good" if row.success else "",
            "turns": row.turns,
            "tokens": row.sampled,
            "state": row.state,
            "end": row.end,
            "versions": "–".join(dict.fromkeys((str(row.oldest), str(row.newest)))),
            "versions_sort": row.newest,
            "prompt": row.prompt,
            "preview": row.preview,
        }
        for row in page.rows
    ]


def _page_address(query: dict[str, str], cursor: str) -> str:
    kept_query = {name: value for name, value in query.items() if value and name != "after"}
    return "?" + urlencode(kept_query | ({"after": cursor} if cursor else {}))


def _show_form(query: dict[str, str], domains: list[str], order: str) -> None:
    with tag("form", classes="form", method="get", role="search"):
        with tag("label", "words in prompt or last response", "wide"):
            tag(
                "input",
                classes="in",
                name="text",
                type="search",
                value=query.get("text", ""),
                data_search="",
            )
        for name, label, _ in NUMBERS:
            with tag("label", label):
                tag(
                    "input", classes="in", name=name, inputmode="decimal", value=query.get(name, "")
                )
        _add_select(
            "domain",
            "domain",
            {"": "any", **{option: option for option in domains}},
            query.get("domain", ""),
        )
        _add_select(
            "success", "solved", {"": "any", "yes": "yes", "no": "no"}, query.get("success", "")
        )
        _add_select(
            "state",
            "state",
            {"": "any", **{option: option for option in STATES}},
            query.get("state", ""),
        )
        _add_select("order", "order", ORDERS, order)
        tag("button", "Search", "btn primary", type="submit")
        if any(query.values()):
            tag("a", "clear", "btn", href="?")


def _add_select(name: str, label: str, options: dict[str, str], selected: str) -> None:
    with (
        tag("label", label),
        tag("select", classes="in", name=name, style="width:auto;min-width:84px"),
    ):
        for value, text in options.items():
            attributes: dict[str, Any] = {"selected": True} if value == selected else {}
            tag("option", text, value=value, **attributes)
