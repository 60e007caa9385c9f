"""Runs steps one after the other, each in a process of its own with a time limit, and keeps their
outcomes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from bench.gpu.source import current_commit
from bench.gpu.state import Outcome, State, write_state
from bench.gpu.steps import Machine, Step, why_left_out
from broker.system.children import spawn

END_S: Final = 10.0  # from SIGTERM to SIGKILL

Say = Callable[[str], None]


def run_steps(
    steps: Sequence[Step],
    machine: Machine,
    state: State,
    out: Path,
    *,
    total_s: float,
    again: bool = False,
    say: Say = print,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Run what has not run yet; after each step, the state is in the file ``out``, its output in a
    log next to it.

    Args:
        total_s: time for all steps, those of earlier calls included.
        again: run those that ran, too; their former time does not count.
        variables: of the environment of all steps.
    """
    if again:
        for step in steps:
            state.steps.pop(step.name, None)
    for step in steps:
        if (before := state.steps.get(step.name)) is not None and before.finished:
            say(f"{step.name}: {before.state} before, not repeated (--again)")
            continue
        left_s = total_s - state.seconds
        if why := why_left_out(step, machine, left_s):
            state.steps[step.name] = Outcome("left out", reason=why)
        else:
            limit_s = round(min(step.limit_s, left_s - END_S))
            say(f"{step.name}: {step.shows}, at most {limit_s} s")
            log = out.with_name(f"{out.stem}-{step.name}.log")
            outcome = run_one(step, machine, log, limit_s, variables or {})
            state.steps[step.name] = replace(outcome, commit=current_commit())
        outcome = state.steps[step.name]
        write_state(out, state)
        say(
            f"{step.name}: {outcome.state} in {outcome.seconds:.0f} s"
            + (f": {outcome.reason}" * bool(outcome.reason))
        )


def run_one(
    step: Step, machine: Machine, log: Path, limit_s: float, variables: Mapping[str, str]
) -> Outcome:
    """Run one step to its end or its limit; end what it started."""
    began = time.monotonic()
    with log.open("wb") as file:
        child = spawn(step.command(machine), file, env={**os.environ, **variables})
        try:
            code: int | None = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(child)
    return _outcome(
        code, limit_s, time.monotonic() - began, log.read_text(encoding="utf-8", errors="replace")
    )


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a child, and what is left of its process group; its own children end with it."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        if child.poll() is None:
            child.terminate()
            child.wait(END_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _outcome(code: int | None, limit_s: float, seconds: float, text: str) -> Outcome:
    lines = text.strip().splitlines()
    took = round(seconds, 1)
    result = _result(lines)
    if code is None:
        return Outcome("timed out", took, f"it did not end within {limit_s:g} s", result)
    if code == 0 and result:
        return Outcome("passed", took, "", result)
    error = next((line for line in reversed(lines) if line.startswith("error: ")), "")
    last = (error or lines[-1])[:300] if lines else "it printed nothing"
    reason = (
        f"failed checks: {', '.join(result['failed'])}"
        if result.get("failed")
        else f"exit code {code}: {last}"
    )
    return Outcome("failed", took, reason, result)


def _result(lines: Sequence[str]) -> dict[str, Any]:
    """Return the object on the last line that is one; empty if there is none."""
    for line in reversed(lines):
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                figures: dict[str, Any] = json.loads(line)
                return figures
    return {}
