"""One group: its episodes side by side, token by token, and the way of its ticket."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

from broker.errors import UserError
from rlearner.console.components import Tokens, banner, tag
from rlearner.console.index.answers import GroupView, Provenance
from rlearner.console.pages.frame import ask, frame, link
from rlearner.console.state import ConsoleRun, ConsoleState

COLOURS: Final = ("logprob", "advantage", "entropy", "ratio", "version", "reward", "none")
MAX_TOKENS: Final = 60_000  # that a browser lays out in a second or two


async def group_page(
    state: ConsoleState, run: ConsoleRun, ticket: int, colour: str, episode: str
) -> None:
    """Build the page of a ticket's group."""
    view: GroupView | None = None
    way: Provenance | None = None
    problem = ""
    try:
        view = await ask(lambda: run.queries.group(ticket))
    except UserError as error:
        problem = " ".join(str(error).split())
        try:
            way = await ask(lambda: run.queries.provenance(ticket))
        except UserError:
            way = None
    way = view.provenance if view is not None else way
    with frame(state, f"Ticket {ticket}", run, "trajectories"):
        with tag("div", classes="head"):
            tag("h1", f"Ticket {ticket}")
            if way is not None:
                trained = f", trained in step {way.step}" if way.step else ""
                tag("span", f"{way.state}{trained}; {way.domain}, task {way.task_index}", "dim")
            tag("span", classes="grow")
            with tag("div", classes="segment"):
                tag(
                    "a",
                    "previous",
                    "btn",
                    href=link("run", run.name, "group", ticket - 1),
                    rel="prev",
                )
                tag("a", "next", "btn", href=link("run", run.name, "group", ticket + 1), rel="next")
            if way is not None and way.step:
                tag(
                    "a",
                    "its step on the timeline",
                    "btn",
                    href=f"{link('run', run.name, 'timeline')}?step={way.step}",
                )
        if problem:
            banner(problem, "bad")
        if view is not None:
            _show_group(view, colour, episode)
        if way is not None:
            with tag("section", classes="panel"):
                tag("h2", "Its way, as rlearner trace shows it")
                tag("pre", "\n".join(way.text), "log", tabindex="0")


def _show_group(view: GroupView, colour: str, episode: str) -> None:
    if view.tokenizer.startswith("none"):
        banner(f"tokenizer: {view.tokenizer}")
    with tag("section", classes="panel"), tag("dl", classes="kv"):
        for name, value in (("prompt", view.prompt), ("reference", view.reference)):
            if value:
                tag("dt", name)
                tag("dd", value[:4000], style="white-space:pre-wrap")
        tag("dt", "temperature")
        tag("dd", f"{view.temperature:g}")
        tag("dt", "rewards")
        tag("dd", ", ".join(f"{trajectory.reward:g}" for trajectory in view.trajectories))
    selected_trajectories = [
        trajectory
        for trajectory in view.trajectories
        if not episode.isdigit() or trajectory.episode == int(episode)
    ]
    episodes: list[dict[str, Any]] = []
    count = 0
    for trajectory in selected_trajectories or view.trajectories:
        plain: dict[str, Any] = asdict(trajectory)
        tokens = sum(len(piece["tokens"]) for piece in plain["pieces"])
        count += tokens
        if count > MAX_TOKENS and episodes:
            banner(
                f"{len(selected_trajectories) - len(episodes)} more episodes are not shown; add "
                "?episode=N to the address"
            )
            break
        episodes.append(plain)
    start = colour if colour in COLOURS and colour not in view.unavailable else "logprob"
    Tokens(episodes, view.unavailable, start)
    if view.frames:
        with tag("section", classes="panel"):
            tag("h2", f"Frames of episode 0: {len(view.frames)}")
            for frame_text in view.frames[:200]:
                tag("pre", frame_text, "frame")
