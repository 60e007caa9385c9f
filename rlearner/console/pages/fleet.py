"""The processes of a run and the queues between them, as the broker tells it now."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import Any, Final

from nicegui import ui
from nicegui.element import Element

from broker.contract import wire
from broker.runtime.presence import display_name
from broker.system.visible_text import visible
from rlearner.console.components import Flow, Grid, banner, tag
from rlearner.console.live import BrokerView
from rlearner.console.pages.frame import Page, frame
from rlearner.console.state import ConsoleRun, ConsoleState

TAIL_BYTES: Final = 16 * 1024
LOG_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,120}\.log")
TONES: Final = {"serving": "good", "starting": "warn", "draining": "warn", "failed": "bad"}
COLUMNS: Final[list[dict[str, Any]]] = [
    {"key": "process", "title": "process"},
    {"key": "state", "title": "state", "kind": "pill"},
    {"key": "version", "title": "version", "n": True},
    {"key": "busy", "title": "slots in use", "n": True},
    {"key": "waiting", "title": "waiting", "n": True},
    {"key": "speed", "title": "tokens/s", "n": True},
    {"key": "idle", "title": "idle", "n": True},
    {"key": "memory", "title": "memory", "n": True},
    {"key": "host", "title": "host"},
    {"key": "pid", "title": "pid", "n": True},
    {"key": "serves", "title": "serves"},
    {"key": "trouble", "title": "last warning or error", "wrap": True},
]


async def fleet_page(state: ConsoleState, run: ConsoleRun, log_name: str) -> None:
    """Build the page; ``log_name``: the file whose end is shown."""
    page = Page(state)
    live = run.live
    names = await asyncio.to_thread(log_files, run.folder)
    selected_log = log_name if log_name in names else next(iter(names), "")
    end = await asyncio.to_thread(tail, run.folder, selected_log)
    with frame(state, "Fleet", run, "fleet") as banners:
        with tag("div", classes="head"):
            tag("h1", "Fleet")
            about = tag("span", _describe_view(live.view), "dim")
        with tag("section", classes="panel"):
            flow = Flow(flow_parts(run, live.view))
        with tag("section", classes="panel"):
            grid = Grid("processes", COLUMNS, process_rows(live.view), empty="no process is heard")
        with tag("section", classes="panel"):
            tag("h2", "Logs")
            if names:
                with tag("nav", classes="form", aria_label="log files"):
                    for name in names:
                        attributes = {"aria_current": "true"} if name == selected_log else {}
                        tag(
                            "a",
                            name,
                            f"btn{' primary' if name == selected_log else ''}",
                            href=f"?log={name}",
                            **attributes,
                        )
                output = tag("pre", end, "log", tabindex="0", aria_label=f"end of {selected_log}")
            else:
                tag(
                    "p",
                    "no logs in the run's folder: `rlearner up` writes them, and --log-file",
                    "dim",
                )

    old_problem = ""

    async def refresh() -> None:
        nonlocal old_problem
        if live.view.problem != old_problem:
            old_problem = live.view.problem
            banners.clear()
            if old_problem:
                with banners:
                    banner(old_problem)
        _set_text(about, _describe_view(live.view))
        flow.change(flow_parts(run, live.view))
        grid.change(process_rows(live.view))

    async def refresh_log() -> None:
        if names:
            _set_text(output, await asyncio.to_thread(tail, run.folder, selected_log))

    page.until_gone(live.listen(page.soon(refresh), queues=True))
    page.until_gone(ui.timer(2.0, page.soon(refresh_log)).cancel)
    page.soon(refresh)()


def _set_text(element: Element, text: str) -> None:
    if element._text != text:
        element._text = text
        element.update()


def _describe_view(view: BrokerView) -> str:
    if view.problem:
        return ""
    reason = f" ({view.reason})" if view.reason else ""
    return (
        f"{len(view.processes)} processes on {view.broker}; the operator wants it "
        f"{view.desired or 'running'}{reason}"
    )


def process_rows(view: BrokerView) -> list[dict[str, Any]]:
    """Return the table of the processes."""
    rows = []
    for presence in view.processes:
        state = "asleep" if presence.asleep else presence.state
        busy = str(presence.running)
        if presence.slots:
            busy += f"/{presence.slots}"
        serves = ", ".join(presence.serves)
        if presence.role == "rollout":
            serves = f"{presence.engine}, policy {presence.policy}"
        trouble_tone = "warn" if presence.said else ""
        if presence.problem or " ERROR " in presence.said:
            trouble_tone = "bad"
        rows.append(
            {
                "key": f"{presence.role}.{presence.id}",
                "process": display_name(presence.role, presence.id),
                "state": state,
                "state_tone": TONES.get(presence.state, ""),
                "version": presence.policy_version if presence.policy_version >= 0 else None,
                "busy": busy,
                "busy_sort": presence.running,
                "waiting": presence.waiting,
                "speed": round(presence.speed) if presence.speed else None,
                "idle": f"{presence.idle_ratio:.0%}" if presence.idle_ratio >= 0 else None,
                "idle_sort": presence.idle_ratio,
                "memory": _format_memory(presence),
                "host": presence.host,
                "pid": str(presence.pid),
                "serves": serves,
                "trouble": visible(presence.problem or presence.said) or None,
                "trouble_tone": trouble_tone,
            }
        )
    return rows


def _format_memory(presence: wire.Presence) -> str | None:
    """Return the memory of a process of this host."""
    if presence.host != os.uname().nodename:
        return None
    try:
        pages = int(Path(f"/proc/{presence.pid}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    # coarse, so that it seldom changes
    return f"{round(pages * os.sysconf('SC_PAGE_SIZE') / 2**24) * 16:,} MiB"


def flow_parts(run: ConsoleRun, view: BrokerView) -> list[dict[str, Any]]:
    """Return the picture of the streams: processes and what waits between them."""
    by_role: dict[str, list[wire.Presence]] = {}
    for presence in view.processes:
        by_role.setdefault(presence.role, []).append(presence)
    metrics = view.metrics.get("learner.learner")
    values = metrics.values if metrics is not None else {}
    learner = by_role.get("learner", [])
    version = f"version {learner[0].policy_version}" if learner else "not running"
    tickets = ", ".join(
        f"{name} {values[f'ticket/{name}']:.0f}"
        for name in ("open", "trained")
        if f"ticket/{name}" in values
    )

    def waiting(stream: str) -> int | None:
        return sum(view.queues[stream].values()) if stream in view.queues else None

    def several(role: str, word: str) -> list[str]:
        members = by_role.get(role, [])
        running = sum(presence.running for presence in members)
        slots = sum(presence.slots for presence in members)
        return [
            f"{len(members)} {'process' if len(members) == 1 else 'processes'}",
            f"{running} of {slots} {word}",
        ]

    speed = sum(presence.speed for presence in by_role.get("rollout", []))
    servers = [*several("rollout", "requests"), f"{speed:,.0f} tokens/s"]
    arrived = values.get("queue/samples/depth")
    return [
        {"key": "learner", "node": "learner", "lines": [version, tickets]},
        {
            "key": "tickets",
            "edge": "tickets",
            "count": waiting("tickets"),
            "title": "waiting for a hub",
        },
        {"key": "envhub", "node": "environment hubs", "lines": several("envhub", "slots")},
        {
            "key": "generate",
            "edge": "requests",
            "both": True,
            "title": "waiting in the servers",
            "count": sum(presence.waiting for presence in by_role.get("rollout", []))
            if view.processes
            else None,
        },
        {"key": "rollout", "node": "rollout servers", "lines": servers},
        {
            "key": "episodes",
            "edge": "episodes",
            "count": waiting("episodes"),
            "title": "waiting for a reward hub",
        },
        {"key": "rewardhub", "node": "reward hubs", "lines": several("rewardhub", "groups")},
        {
            "key": "samples",
            "edge": "samples",
            "count": int(arrived) if arrived is not None else waiting("samples"),
            "title": "in the log, kept until a checkpoint covers them",
        },
        {
            "key": "back",
            "node": "learner",
            "lines": [learner_step(learner), f"dead letters {waiting('dead') or 0}"],
        },
    ]


def learner_step(learner: list[wire.Presence]) -> str:
    """Return how much of the current step is in."""
    return f"{learner[0].running} of {learner[0].slots} groups of the step" if learner else "–"


def log_files(folder: Path) -> list[str]:
    """Return the names of the run's logs."""
    try:
        return sorted(
            path.name for path in (folder / "logs").iterdir() if LOG_NAME.fullmatch(path.name)
        )
    except OSError:
        return []


def tail(folder: Path, name: str) -> str:
    """Return the end of a log, with control characters made visible."""
    if not LOG_NAME.fullmatch(name):
        return ""
    try:
        with (folder / "logs" / name).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            data = file.read(TAIL_BYTES)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    lines = data.decode("utf-8", "replace").splitlines()[1 if size > TAIL_BYTES else 0 :]
    return "\n".join(visible(line) for line in lines) or "empty"
