"""Reads an episode's result from its program's last line on stdout, its exit status, or neither."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from broker.contract.strict import text_problem
from broker.system.fault import MAX_TRACE_CHARS
from envhub.agents.program import KEPT_BYTES
from envhub.envs.agent import Source

RESULT_KEYS: Final = ("reward", "success", "response", "metrics")
# An agent's output is not trusted: these keep its groups small enough to be sent.
MAX_METRICS: Final = 64
NAME_CHARS: Final = 100  # of a metric
MAX_RESPONSE_CHARS: Final = 1 << 20


class BadResult(ValueError):
    """The program ended without a usable result; ``trace`` is its Python traceback, if any."""

    def __init__(self, detail: str, trace: str = "") -> None:
        super().__init__(detail)
        self.trace = trace


@dataclass(frozen=True)
class AgentResult:
    """The result of an agent.

    Attributes:
        reward: None if reward hubs give it.
        response: what rewards read; None: the last answer of the policy.
    """

    reward: float | None = None
    success: bool = False
    response: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ProgramOutcome:
    """How a program's episode ended.

    Attributes:
        prompt, reference: what reward hubs see as question and answer.
        row: of the task; None if it has none.
    """

    result: AgentResult
    prompt: str
    reference: str = ""
    row: Mapping[str, Any] | None = None


def read(
    source: Source, status: int, stdout: str, stderr: str, *, is_cut: bool = False
) -> AgentResult:
    """Return the result of a program.

    Args:
        source: of the reward: the last line of stdout, a JSON number or object with ``reward``; the
            exit status, 0 for reward 1 and 1 for reward 0; or none.
        status: exit status, negative for a signal.
        stdout: the end of its output.
        stderr: the end of its error output.
        is_cut: whether it printed more than ``stdout``.

    Raises:
        BadResult: if it crashed, or its output is not a result.
    """
    if status and not (source == "exit" and status == 1):
        ending = f"by signal {-status}" if status < 0 else f"with exit code {status}"
        raise BadResult(f"the agent ended {ending}{_last_line(stderr)}", _last_traceback(stderr))
    # not splitlines: JSON may hold other line separators
    line = next((line for line in reversed(stdout.split("\n")) if line.strip()), "").strip()
    if source == "result":
        if is_cut and line == stdout.strip():
            problem = f"is longer than {KEPT_BYTES} bytes: {_short_repr(line)}"
            raise BadResult(f"the last line that the agent printed {problem}")
        return _parse_result(line)
    fields = _parse_object(line)
    # the exit status or reward hubs give it
    fields.pop("reward", None)
    result = _check_result(fields)
    if source == "none":
        return result
    return AgentResult(float(status == 0), status == 0, result.response, result.metrics)


def _last_line(stderr: str) -> str:
    line = next((line for line in reversed(stderr.splitlines()) if line.strip()), "")
    if not line:
        return ""
    return f": {' '.join(line.split())[:300]}"


def _last_traceback(stderr: str) -> str:
    """Return the last traceback of a Python program for the log; empty if there is none."""
    start = stderr.rfind("Traceback (most recent call last)")
    if start < 0:
        return ""
    return stderr[start:].rstrip()[-MAX_TRACE_CHARS:]


def _parse_object(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _parse_result(line: str) -> AgentResult:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        problem = f"is not a JSON number or object with a reward: {_short_repr(line)}"
        raise BadResult(f"the last line that the agent printed {problem}") from None
    if isinstance(value, dict):
        if "reward" not in value:
            raise BadResult(
                f"the last line that the agent printed has no reward: {_short_repr(line)}"
            )
        return _check_result(value)
    return _check_result({"reward": value})


def _check_result(fields: dict[str, Any]) -> AgentResult:
    for key in fields:
        if key not in RESULT_KEYS:
            raise BadResult(f"the agent's result has {key!r}; known: {', '.join(RESULT_KEYS)}")
    reward = None
    if "reward" in fields:
        reward = _finite_number("reward", fields["reward"])
    success = fields.get("success", reward is not None and reward >= 1)
    if not isinstance(success, bool):
        raise BadResult(f"the agent's result has success {_short_repr(success)}, not true or false")
    response = fields.get("response")
    if response is not None and not (
        isinstance(response, str) and len(response) <= MAX_RESPONSE_CHARS
    ):
        raise BadResult(
            f"the agent's response is not a text of at most {MAX_RESPONSE_CHARS} characters"
        )
    if response is not None and (problem := text_problem(response)):
        raise BadResult(f"the agent's result has a response that is {problem}")
    metrics = fields.get("metrics", {})
    if not isinstance(metrics, dict) or len(metrics) > MAX_METRICS:
        raise BadResult(
            f"the agent's result has metrics {_short_repr(metrics)}, "
            f"not at most {MAX_METRICS} numbers by name"
        )
    for name in metrics:
        if not 0 < len(name) <= NAME_CHARS or not name.isprintable():
            allowed = f"a name has 1-{NAME_CHARS} printable characters"
            raise BadResult(f"the agent's result has a metric named {_short_repr(name)}; {allowed}")
    numbers = {name: _finite_number(f"metric {name!r}", value) for name, value in metrics.items()}
    return AgentResult(reward, success, response, numbers)


def _finite_number(label: str, value: object) -> float:
    number = math.nan
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            # an integer beyond every float
            number = math.inf
    if not math.isfinite(number):
        raise BadResult(f"the agent's result has {label} {_short_repr(value)}, not a finite number")
    return number


def _short_repr(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
