"""What a program's end says about its episode: its last line on stdout, its exit status, or nothing. No I/O."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any, Final

from broker.contract.strict import text_problem
from broker.system.workers.fault import MAX_TRACE_CHARS
from envhub.agents.program import KEPT_BYTES
from envhub.envs.agent import Source

KNOWN: Final = ("reward", "success", "response", "metrics")
MAX_METRICS: Final = 64
NAME_CHARS: Final = 100  # of a metric
MAX_RESPONSE_CHARS: Final = 1 << 20


class BadResult(ValueError):
    """The program ended without a result that can be used; says why. ``trace``: its traceback, where it is in
    Python.
    """

    def __init__(self, detail: str, trace: str = "") -> None:
        super().__init__(detail)
        self.trace = trace


@dataclass(frozen=True)
class AgentResult:
    """What an agent came to.

    Attributes:
        reward: None where reward hubs give it.
        response: what rewards read; None: the last answer of the policy.
    """

    reward: float | None = None
    success: bool = False
    response: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)


def read(source: Source, status: int, stdout: str, stderr: str, *, is_cut: bool = False) -> AgentResult:
    """The result of a program.

    Args:
        source: where the reward is: in the last line of stdout, a JSON number or object with ``reward``; in the exit
        status, 0 for 1 and
            1 for 0; or nowhere.
        status: exit status, negative for a signal.
        stdout: the end of what it printed.
        stderr: the end of what it complained about.
        is_cut: whether it printed more than ``stdout``.

    Raises:
        BadResult: it crashed, or what it printed is no result.
    """
    if status and not (source == "exit" and status == 1):
        raise BadResult(f"the agent {_how(status)}{_last(stderr)}", _trace(stderr))
    # JSON may hold other line separators
    line = next((line for line in reversed(stdout.split("\n")) if line.strip()), "").strip()
    if source == "result":
        if is_cut and line == stdout.strip():
            raise BadResult(f"the last line that the agent printed is longer than {KEPT_BYTES} bytes: {_shown(line)}")
        return _result(line)
    found = _object(line)
    extra = _checked({key: value for key, value in found.items() if key != "reward"}) if found else AgentResult()
    if source == "none":
        return extra
    return AgentResult(float(status == 0), status == 0, extra.response, extra.metrics)


def _how(status: int) -> str:
    return f"ended by signal {-status}" if status < 0 else f"ended with exit code {status}"


def _last(stderr: str) -> str:
    line = next((line for line in reversed(stderr.splitlines()) if line.strip()), "")
    return f": {' '.join(line.split())[:300]}" if line else ""


def _trace(stderr: str) -> str:
    """The last traceback of a program in Python, for the log; empty for any other."""
    start = stderr.rfind("Traceback (most recent call last)")
    return stderr[start:].rstrip()[-MAX_TRACE_CHARS:] if start >= 0 else ""


def _object(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _result(line: str) -> AgentResult:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise BadResult(
            f"the last line that the agent printed is no JSON number or object with a reward: {_shown(line)}"
        ) from None
    if isinstance(found, dict):
        if "reward" not in found:
            raise BadResult(f"the last line that the agent printed has no reward: {_shown(line)}")
        return _checked(found)
    return _checked({"reward": found})


def _checked(found: dict[str, Any]) -> AgentResult:
    for key in found:
        if key not in KNOWN:
            raise BadResult(f"the agent's result has {key!r}; known: {', '.join(KNOWN)}")
    reward = None if "reward" not in found else _number("reward", found["reward"])
    success = found.get("success", reward is not None and reward >= 1)
    if not isinstance(success, bool):
        raise BadResult(f"the agent's result has success {_shown(success)}, not true or false")
    response = found.get("response")
    if response is not None and not (isinstance(response, str) and len(response) <= MAX_RESPONSE_CHARS):
        raise BadResult(f"the agent's result has a response that is no text of at most {MAX_RESPONSE_CHARS} characters")
    if response is not None and (problem := text_problem(response)):
        raise BadResult(f"the agent's result has a response that is {problem}")
    metrics = found.get("metrics", {})
    if not isinstance(metrics, dict) or len(metrics) > MAX_METRICS:
        raise BadResult(f"the agent's result has metrics {_shown(metrics)}, not at most {MAX_METRICS} numbers by name")
    for name in metrics:
        if not 0 < len(name) <= NAME_CHARS or not name.isprintable():
            raise BadResult(
                f"the agent's result has a metric named {_shown(name)}; a name has 1-{NAME_CHARS} printable characters"
            )
    return AgentResult(
        reward, success, response, {name: _number(f"metric {name!r}", value) for name, value in metrics.items()}
    )


def _number(what: str, value: object) -> float:
    try:
        number = float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    except OverflowError:  # an integer beyond every float
        number = math.inf
    if not math.isfinite(number):
        raise BadResult(f"the agent's result has {what} {_shown(value)}, not a finite number")
    return number


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
