"""Operator's actions: pause, resume, drain, stop, checkpoint, evaluate (``--actions``)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Final

from nicegui.element import Element

from rlearner.console import actions
from rlearner.console.components import banner, tag
from rlearner.console.pages.dead_letters import confirm
from rlearner.console.pages.frame import Page, frame, perform
from rlearner.console.state import ConsoleRun, ConsoleState
from rlearner.ops.learner_requests import Action

STATES: Final = (
    (
        "pause",
        "Pause",
        "Take no new work until it is resumed. Work in progress is finished.",
        False,
    ),
    ("resume", "Resume", "Continue after a pause.", False),
    (
        "drain",
        "Drain",
        "Start no new work, finish what runs, write a checkpoint; learner and hubs exit.",
        True,
    ),
    (
        "stop",
        "Stop",
        "Stop every process. The learner writes a checkpoint and can be started again.",
        True,
    ),
)
REQUESTS: Final[tuple[tuple[Action, str, str], ...]] = (
    (
        "checkpoint",
        "Checkpoint now",
        "Write a checkpoint at the next step boundary, outside the schedule.",
    ),
    (
        "evaluate",
        "Evaluate now",
        "Evaluate the current policy on the held-out tasks, outside the schedule.",
    ),
)


async def actions_page(state: ConsoleState, run: ConsoleRun) -> None:
    page = Page(state)
    with frame(state, "Actions", run, "actions") as banners:
        with tag("div", classes="head"):
            tag("h1", "Actions")
            about = tag("span", "", "dim")
        output = tag("div", classes="mono", role="status", aria_live="polite", data_output="")
        with tag("section", classes="panel"):
            with (
                tag("div", classes="form"),
                tag("label", "reason, for the processes' logs", "wide"),
            ):
                reason = tag("input", classes="in", name="reason", maxlength="200", data_search="")
            reason_field = {"reason": ""}
            reason.on(
                "change",
                lambda event: reason_field.update(reason=str(event.args)),
                js_handler="(e) => emit(e.target.value)",
            )
            with tag("div", classes="actions"):
                for command, title, text, asks in STATES:
                    _action_button(
                        title,
                        text,
                        f"{title} run {run.name}?" if asks else "",
                        output,
                        partial(_set_desired, page, run, command, reason_field),
                    )
                for action, title, text in REQUESTS:
                    _action_button(
                        title, text, "", output, partial(_request_action, page, run, action)
                    )
        with tag("section", classes="panel"):
            tag("h2", "Outcome")
            output.move()

    old_problem = ""

    async def refresh() -> None:
        nonlocal old_problem
        view = run.live.view
        if view.problem != old_problem:
            old_problem = view.problem
            banners.clear()
            if old_problem:
                with banners:
                    banner(old_problem, "bad")
        reason = f" ({view.reason})" if view.reason else ""
        text = "" if view.problem else f"the operator wants it {view.desired or 'running'}{reason}"
        if about._text != text:
            about._text = text
            about.update()

    page.until_gone(run.live.listen(page.soon(refresh)))
    page.soon(refresh)()


def _action_button(
    title: str,
    text: str,
    question: str,
    output: Element,
    lines: Callable[[], AsyncGenerator[str, None]],
) -> None:
    with tag("div", classes="act"):
        button = tag("button", title, f"btn{' danger' if question else ''}")
        tag("span", text, "dim")
    if question:
        confirm(button, question)
    button.on("confirmed" if question else "click", lambda: perform(output, button, lines))


async def _set_desired(
    page: Page, run: ConsoleRun, command: str, reason_field: dict[str, str]
) -> AsyncGenerator[str, None]:
    for line in await actions.set_desired(
        await run.live.connected(), command, reason_field["reason"], page.session
    ):
        yield line


async def _request_action(page: Page, run: ConsoleRun, action: Action) -> AsyncGenerator[str, None]:
    async for line in actions.request(await run.live.connected(), action, page.session):
        yield line
