"""Writes the outcomes of ``python -m bench.gpu`` as a table, and as one line of JSON. Pure but for
the file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from bench.gpu.source import current_commit
from bench.gpu.state import Outcome, State
from bench.gpu.steps import Step
from broker.errors import UserError

BEGIN: Final = "<!-- bench.gpu: the table below is written by python -m bench.gpu -->"
END: Final = "<!-- bench.gpu: end -->"


def table(steps: Sequence[Step], state: State, day: str, commit: str = "") -> str:
    """Return a Markdown table of all steps; a step that ran with another commit names it."""
    heading = f"{state.device}, {day}" + (f", commit {commit[:8]}" if commit else "")
    lines = [f"{heading}:", "", "| step | outcome | figures |", "|---|---|---|"]
    for step in steps:
        outcome = state.steps.get(step.name, Outcome("not run"))
        found = {
            name: outcome.result[name]
            for name in step.figures
            if outcome.result.get(name) is not None
        }
        shown = [f"{name} {_figure(value)}" for name, value in found.items()]
        why = (
            f": {outcome.reason}"
            if outcome.reason
            else f", {outcome.seconds:.0f} s"
            if outcome.seconds
            else ""
        )
        if outcome.commit != commit and outcome.finished and outcome.commit:
            why += f", commit {outcome.commit[:8]}"
        cells = (step.name, outcome.state + why, ", ".join(shown))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _figure(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def replace_table(text: str, new: str) -> str:
    """Return a page's text with the table between the markers replaced.

    Raises:
        UserError: if the markers are missing.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UserError(f"no markers for the table; the page needs the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{new}\n\n{END}{after}"


def write_table(page: Path, steps: Sequence[Step], state: State) -> None:
    """Replace the table of a page.

    Raises:
        UserError: if the page cannot be read or written, or has no markers.
    """
    try:
        text = page.read_text(encoding="utf-8")
        new = table(steps, state, f"{datetime.now(UTC):%Y-%m-%d}", current_commit())
        page.write_text(replace_table(text, new), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{page}: {error.strerror}") from None


def last_line(steps: Sequence[Step], state: State) -> str:
    """Return the line of JSON: the names of steps by outcome, and the figures of each."""
    by_state: dict[str, list[str]] = {"passed": [], "failed": [], "timed out": [], "left out": []}
    figures: dict[str, dict[str, Any]] = {}
    for step in steps:
        if (outcome := state.steps.get(step.name)) is not None:
            by_state[outcome.state].append(step.name)
            figures[step.name] = {
                name: outcome.result[name] for name in step.figures if name in outcome.result
            }
    named = {name.replace(" ", "_"): found for name, found in by_state.items()}
    line = {
        "bench": "bench.gpu",
        "device": state.device,
        "commit": current_commit(),
        **named,
        "seconds": round(state.seconds, 1),
    }
    return json.dumps(line | {"figures": figures})
