"""Draws the live view of ``rlearner up`` with rich from a ``LiveRunState``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from broker.contract import wire
from broker.runtime.presence import display_name
from rlearner.up.live_state import LiveRunState, format_duration, sparkline

DASH: Final = "-"
STATE_COLOUR = {"serving": "green", "starting": "yellow", "draining": "yellow", "failed": "red"}


def draw_screen(board: LiveRunState, events: list[str], logs: Path) -> RenderableType:
    """Return the whole screen. ``logs``: the folder of the processes' logs."""
    recent = [Text(line, style="dim") for line in events[-4:]]
    parts = Group(
        draw_progress(board),
        *trouble_lines(board, logs),
        figures_table(board),
        health_table(board),
        *recent,
    )
    title = f"rlearner  {board.run}"
    subtitle = "Ctrl-C stops everything cleanly"
    return Panel(parts, title=title, subtitle=subtitle, border_style="cyan")


def draw_progress(board: LiveRunState) -> RenderableType:
    """Return a progress bar with step and remaining time; before the first step, the phase."""
    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(ratio=1)
    row.add_column(justify="right", no_wrap=True)
    eta = board.eta_s()
    label = f"step {board.step}/{board.total_steps}" if board.step else board.phase
    if eta is not None:
        label += f"  eta {format_duration(eta)}"
    row.add_row(ProgressBar(total=board.total_steps, completed=board.step), label)
    return row


def trouble_lines(board: LiveRunState, logs: Path) -> list[RenderableType]:
    """Return the lines about idle hubs, failed groups, learning signals and logged warnings.

    Failed groups are red until a group is trained after the newest failure.
    """
    lines: list[RenderableType] = [Text(line, style="bold red") for line in board.problems()]
    if board.failures.total:
        style = "bold red" if board.failures.stuck else "yellow"
        lines.append(Text(board.failures.line(logs), style=style))
    lines += [Text(f"warning: {text}", style="yellow") for text in board.signals.active.values()]
    for text in board.said():
        lines.append(Text(text, style="red" if " ERROR " in text else "yellow"))
    return lines


def figures_table(board: LiveRunState) -> RenderableType:
    """Return a table of reward, success, staleness, idle shares, throughput, queues.

    A figure that no step has measured yet is a dash.
    """
    line = board.line
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="cyan")
    table.add_row("reward", _figure(line, "reward/mean", ".3f"), sparkline(board.rewards))
    success = _figure(line, "env/success_rate", ".3f")
    table.add_row("success rate", success, sparkline(board.successes))
    rates = [f"{rate:.3f} after step {step}" for step, rate in board.evals[-4:]]
    rates += [f"{name} {rate:.3f}" for name, rate in sorted(board.baselines.items())]
    newest = f"{board.evals[-1][1]:.3f}" if board.evals else DASH
    table.add_row("evaluation", newest, "  ".join(rates))
    stalest = f"max {_figure(line, 'staleness/max', '.0f')}"
    table.add_row("staleness", _figure(line, "staleness/mean", ".2f"), stalest)
    generator = f"{_figure(line, 'rollouter/idle_ratio', '.0%')} generator"
    table.add_row("idle", _figure(line, "trainer/idle_ratio", ".0%"), f"learner, {generator}")
    samples = f"{_figure(line, 'perf/samples_per_s', '.1f')} samples/s"
    table.add_row("tokens/s", _figure(line, "perf/tokens_per_s", ".0f"), samples)
    if board.bottleneck:
        table.add_row("bottleneck", "", board.bottleneck)
    depths = [
        (name, value) for name, value in sorted(board.line.items()) if name.startswith("queue/")
    ]
    queues = "  ".join(f"{name.split('/')[1]} {value:.0f}" for name, value in depths)
    table.add_row("queues", "", queues or DASH)
    return table


def _figure(line: Mapping[str, float], name: str, form: str) -> str:
    return format(line[name], form) if name in line else DASH


def health_table(board: LiveRunState) -> RenderableType:
    """Return one row for each process; a narrow screen cuts what it serves, never its state."""
    processes = sorted(board.processes.values(), key=lambda presence: (presence.role, presence.id))
    rows = [_process_row(presence) for presence in processes]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for number, title in enumerate(("process", "state", "pid", "version", "running", "waiting")):
        # Without a minimum rich shrinks these columns before the last one.
        width = max(len(title), *(len(row[number]) for row in rows), 0)
        table.add_column(
            title, justify="left" if number < 2 else "right", no_wrap=True, min_width=width
        )
    table.add_column("", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _process_row(presence: wire.Presence) -> tuple[str | Text, ...]:
    version = str(presence.policy_version) if presence.policy_version >= 0 else "-"
    serves = presence.engine if presence.role == "rollout" else ", ".join(presence.serves)
    busy = str(presence.running)
    if presence.slots:
        busy += f"/{presence.slots}"
    name = display_name(presence.role, presence.id)
    state = Text(presence.state, style=STATE_COLOUR[presence.state])
    return name, state, str(presence.pid), version, busy, str(presence.waiting), serves
