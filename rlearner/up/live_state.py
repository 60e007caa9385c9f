"""The state behind the live view, folded from metrics and presence messages. No I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from broker.contract import wire
from broker.system.reminders import Reminders
from learner.reporting.metrics import step_of
from learner.reporting.training_signals import TrainingWarnings
from rlearner.advise.follow import StepHistory
from rlearner.up.failed_groups import FailedGroups

SPARKS = "▁▂▃▄▅▆▇█"
ADVICE_COST_S = 1.0  # the first advice is taken to cost this, so that short runs do without it


def sparkline(values: list[float], width: int = 30) -> str:
    """Return the newest values as block characters, scaled between their minimum and maximum."""
    finite = [value for value in values[-width:] if math.isfinite(value)]
    if not finite:
        return ""
    low = min(finite)
    span = (max(finite) - low) or 1.0
    # The largest value is just below 8, the number of characters.
    return "".join(SPARKS[int((value - low) / span * 7.999)] for value in finite)


def format_duration(seconds: float) -> str:
    """Format seconds: 65 becomes ``1:05``."""
    whole = max(0, round(seconds))
    hours, remainder = divmod(whole, 3600)
    minutes, secs = divmod(remainder, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{secs:02d}"
    return f"{minutes}:{secs:02d}"


@dataclass
class LiveRunState:
    """State of a run as the operator sees it."""

    run: str
    total_steps: int
    step: int = 0
    phase: str = "starting"
    line: dict[str, float] = field(default_factory=dict)  # the newest line of metrics.jsonl
    rewards: list[float] = field(default_factory=list)
    successes: list[float] = field(default_factory=list)
    # (step after which it began, success rate)
    evals: list[tuple[int, float]] = field(default_factory=list)
    baselines: dict[str, float] = field(default_factory=dict)  # policy to success rate
    processes: dict[str, wire.Presence] = field(default_factory=dict)
    live: dict[str, wire.Metrics] = field(default_factory=dict)  # newest metrics of each process
    failures: FailedGroups = field(default_factory=FailedGroups)
    signals: TrainingWarnings = field(default_factory=TrainingWarnings)
    news: list[str] = field(default_factory=list)  # lines not shown yet
    history: StepHistory = field(default_factory=lambda: StepHistory(ADVICE_COST_S))
    bottleneck: str = ""  # and what would change it; empty before the first step
    _log_reminders: dict[str, Reminders] = field(default_factory=dict)
    first_step_at: tuple[float, int] | None = None  # (monotonic seconds, step)
    last_step_at: float = 0.0

    def take(self, metrics: wire.Metrics, now: float) -> bool:
        """Apply one message, and return whether it completes a step."""
        self.live[f"{metrics.role}.{metrics.id}"] = metrics
        if metrics.role != "learner":
            return False
        self.phase = metrics.text.get("phase", self.phase)
        values = metrics.values
        self.failures.take(values, metrics.text)
        step = int(values.get("step", 0))
        if step <= self.step or "reward/mean" not in values:
            return False
        self.step = step
        self.line = dict(values)
        self.last_step_at = now
        self.history.take(values)
        new_warnings, past_warnings = self.signals.take(values)
        self.news += [f"warning: {text}" for text in new_warnings]
        self.news += [f"no longer: {text}" for text in past_warnings]
        self.first_step_at = self.first_step_at or (now, step)
        self.rewards.append(values["reward/mean"])
        self.successes.append(values.get("env/success_rate", math.nan))
        if "eval/success_rate" in values:
            label = step_of(values, "eval/success_rate")
            self.evals.append((label, values["eval/success_rate"]))
        for name, value in values.items():
            parts = name.split("/")
            if len(parts) == 3 and parts[0] == "eval" and parts[2] == "success_rate":
                self.baselines[parts[1]] = value
        return True

    def see(self, present: Iterable[wire.Presence], now: float = 0.0) -> list[str]:
        """Replace the live processes; return lines about those that stopped or resumed work."""
        previous = self.processes
        self.processes = {f"{presence.role}.{presence.id}": presence for presence in present}
        lines = []
        for key, presence in self.processes.items():
            had_problem = bool(key in previous and previous[key].problem)
            has_problem = bool(presence.problem)
            if has_problem and not had_problem:
                lines.append(f"{presence.role} {presence.id}: {presence.problem}")
            elif had_problem and not has_problem:
                lines.append(f"{presence.role} {presence.id} takes work again")
            previous_line = previous[key].said if key in previous else ""
            self._queue_log_line(key, presence, previous_line, now)
        return lines

    def _queue_log_line(
        self, key: str, presence: wire.Presence, previous_line: str, now: float
    ) -> None:
        """Queue a line that a process logged: the first at once, the next at growing intervals."""
        reminders = self._log_reminders.setdefault(key, Reminders())
        line = presence.said
        if not line:
            reminders.over()
        elif line != previous_line and not self._is_signal(line) and reminders.due(now):
            self.news.append(f"{presence.role} {presence.id}: {line}")

    def said(self) -> list[str]:
        """Return the newest warning or error of each process, without learning signals."""
        return [
            f"{presence.role} {presence.id}: {presence.said}"
            for presence in self.processes.values()
            if presence.said and not self._is_signal(presence.said)
        ]

    def _is_signal(self, line: str) -> bool:
        """Return whether this is a warning about learning, which the learner logs as well."""
        return any(text[:100] in line for text in self.signals.active.values())

    def problems(self) -> list[str]:
        """Return why processes take no work, one line each."""
        return [
            f"{presence.role} {presence.id}: {presence.problem}"
            for presence in self.processes.values()
            if presence.problem
        ]

    def eta_s(self) -> float | None:
        """Return the seconds until the last step at the pace so far, None before two steps."""
        if self.first_step_at is None or self.step <= self.first_step_at[1]:
            return None
        began, first = self.first_step_at
        return (self.last_step_at - began) / (self.step - first) * (self.total_steps - self.step)

    def plain(self) -> str:
        """Return one log line, for output that is not a terminal."""
        get = self.line.get
        parts = [
            f"step {self.step}/{self.total_steps}",
            f"reward {get('reward/mean', 0):.3f}",
            f"success {get('env/success_rate', 0):.3f}",
            f"staleness {get('staleness/mean', 0):.2f} (max {get('staleness/max', 0):.0f})",
            f"idle learner {get('trainer/idle_ratio', 0):.0%} "
            f"generator {get('rollouter/idle_ratio', 0):.0%}",
            f"{get('perf/tokens_per_s', 0):.0f} tokens/s",
            f"{get('perf/samples_per_s', 0):.1f} samples/s",
        ]
        if "eval/success_rate" in self.line:
            rate = self.line["eval/success_rate"]
            label = step_of(self.line, "eval/success_rate")
            parts.append(f"eval success {rate:.3f} after step {label}")
        if self.failures.total:
            parts.append(f"failed groups {self.failures.total}")
        if (eta := self.eta_s()) is not None:
            parts.append(f"eta {format_duration(eta)}")
        return "  ".join(parts)
