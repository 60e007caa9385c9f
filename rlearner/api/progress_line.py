"""Shows the events of ``rlearner up``: one line that changes, or plain lines where it cannot."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from broker.system.visible_text import visible
from rlearner.up.live_state import format_duration

BAR_CHARS: Final = 20
# Events that stay readable above the line.
LASTING: Final = ("changed", "completed", "failed", "failed_groups", "listening", "warning")


class ProgressLine:
    """One line in a terminal or notebook, which is replaced; elsewhere a line for each step.

    Args:
        run: name of the run.
        steps: of the whole run.
    """

    def __init__(self, run: str, steps: int) -> None:
        self._run = run
        self._steps = steps
        self._show = _notebook_writer() or _terminal_writer()
        self._began = time.monotonic()
        self._first_step = 0

    def show(self, event: Mapping[str, Any]) -> None:
        """Show an event, an object of ``rlearner up --json``."""
        kind = str(event.get("event"))
        message = visible(str(event.get("message", "")))
        if kind == "step":
            self._write(self._step_text(int(event["step"]), event["figures"]))
        elif kind == "phase":
            self._write(f"{self._run}: {message}")
        elif kind in LASTING and message:
            self._print(message)

    def close(self) -> None:
        """Leave the line as it is, and begin another."""
        if self._show is not None:
            self._show("", True)

    def _step_text(self, step: int, figures: Mapping[str, float]) -> str:
        passed = step - (self._first_step or step)
        if not self._first_step:
            self._first_step = step
            self._began = time.monotonic()
        bar = ""
        if self._show is not None:
            num_full = min(BAR_CHARS * step // max(self._steps, 1), BAR_CHARS)
            bar = f"[{'#' * num_full:-<{BAR_CHARS}}] "
        words = [f"{self._run}: {bar}step {step}/{self._steps}"]
        if "reward/mean" in figures:
            words.append(f"reward {figures['reward/mean']:.3f}")
        if passed:
            left_s = (time.monotonic() - self._began) / passed * (self._steps - step)
            words.append(f"eta {format_duration(left_s)}")
        return "  ".join(words)

    def _write(self, text: str) -> None:
        if self._show is None:
            print(text, flush=True)
        else:
            self._show(text, False)

    def _print(self, text: str) -> None:
        if self._show is not None:
            self._show("", False)
        print(text, flush=True)


class _NotebookText(str):
    """A text that a notebook shows without quotes."""

    def __repr__(self) -> str:
        return str(self)


LineWriter = Callable[[str, bool], None]


def _notebook_writer() -> LineWriter | None:
    """Return what replaces the line in a notebook's cell; None outside notebooks."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if not hasattr(shell, "kernel"):
        return None
    from IPython.display import display

    handle = display(_NotebookText(""), display_id=True)

    def show(text: str, is_last: bool) -> None:
        if text:
            handle.update(_NotebookText(text))

    return show


def _terminal_writer() -> LineWriter | None:
    """Return what replaces the line in a terminal; None elsewhere."""
    if not sys.stdout.isatty():
        return None

    def show(text: str, is_last: bool) -> None:
        line = text[: shutil.get_terminal_size().columns - 1]
        print("" if is_last else f"\r\x1b[2K{line}", end="\n" if is_last else "", flush=True)

    return show
