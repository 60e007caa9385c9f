"""Records which operators of torch take the time of some steps: ``train.profile.steps``.

The learner records each step's training, an engine the tokens that it samples with the weights that
the step starts from. Each step gives a Chrome trace (chrome://tracing, ui.perfetto.dev), the last
one a table of the largest operators of all.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from broker.errors import UserError
from broker.system.private_files import private_folder, private_write, replace

log = logging.getLogger(__name__)

# Work recorded of one step: its events stay in memory until they are written.
MAX_RECORDED_S: Final = 10.0
MAX_TRACE_BYTES: Final = 64 << 20  # compressed; a larger trace is deleted
NUM_OPERATORS: Final = 10
FOLDER: Final = "profile"  # within the run's folder


@dataclass(frozen=True)
class ProfilePlan:
    """What to record, and where.

    Attributes:
        folder: for traces and table.
        name: of the process, the beginning of its files' names.
        first, last: steps.
    """

    folder: Path
    name: str
    first: int
    last: int


@dataclass
class OperatorTotal:
    """Calls of one operator, and the seconds in it without the operators that it calls."""

    calls: int = 0
    cpu_s: float = 0.0
    device_s: float = 0.0


@dataclass
class ProfileTotals:
    """The operators of all steps that were recorded."""

    steps: list[int] = field(default_factory=list)
    operators: dict[str, OperatorTotal] = field(default_factory=dict)

    def add(self, rows: Iterable[Any]) -> None:
        """Add the rows of ``torch.profiler.profile.key_averages``."""
        for row in rows:
            total = self.operators.setdefault(row.key, OperatorTotal())
            total.calls += row.count
            total.cpu_s += row.self_cpu_time_total / 1e6
            total.device_s += row.self_device_time_total / 1e6

    def table(self) -> list[str]:
        """Return the lines of the table: the largest by time on the device, else on the CPU."""
        on_device = any(total.device_s for total in self.operators.values())
        seconds = {
            name: total.device_s if on_device else total.cpu_s
            for name, total in self.operators.items()
        }
        whole = sum(seconds.values()) or 1.0
        place = "device" if on_device else "CPU"
        steps = ", ".join(map(str, self.steps))
        lines = [f"step {steps}: {whole:.3f} s of operators on the {place}"]
        lines.append(f"{'operator':52} {'seconds':>9} {'share':>7} {'calls':>9}")
        for name in sorted(seconds, key=lambda name: -seconds[name])[:NUM_OPERATORS]:
            share = seconds[name] / whole
            calls = self.operators[name].calls
            lines.append(f"{name[:52]:52} {seconds[name]:9.3f} {share:7.1%} {calls:9}")
        return lines


class StepProfiler:
    """Records the steps of a plan; used by one thread.

    Args:
        plan: None records nothing.
    """

    def __init__(self, plan: ProfilePlan | None) -> None:
        self._plan = plan
        self._profile: Any = None  # of the step under way
        self._step = 0
        self._recorded_s = 0.0
        self._totals = ProfileTotals()

    @property
    def is_active(self) -> bool:
        """Whether there is anything left to record or write."""
        return self._plan is not None

    @contextmanager
    def record(self, step: int) -> Iterator[None]:
        """Record the work within, which belongs to a step."""
        if not self._begin(step):
            yield
            return
        began = time.monotonic()
        try:
            yield
        finally:
            self._recorded_s += time.monotonic() - began
            if self._recorded_s > MAX_RECORDED_S:
                self._write()

    def end(self, step: int) -> None:
        """Write what was recorded up to a step, and the table after the last one."""
        self._write()
        if self._plan is not None and step >= self._plan.last:
            self.close()

    def close(self) -> None:
        """Write what was recorded; record nothing from now on."""
        self._write()
        if self._plan is not None and self._totals.steps:
            self._write_table(self._plan)
        self._plan = None

    def _begin(self, step: int) -> bool:
        """Return whether the work of a step is recorded; end the step before."""
        plan = self._plan
        if plan is None:
            return False
        if self._profile is not None and step != self._step:
            self._write()
        if step > plan.last:
            self.close()
        if not plan.first <= step <= plan.last or step in self._totals.steps:
            return False
        if self._profile is None:
            self._start(step)
        return self._profile is not None

    def _start(self, step: int) -> None:
        # Kineto prints lines of its own to stderr; it reads this when it starts.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        from torch.profiler import profile

        recording = profile()
        try:
            recording.start()
        except RuntimeError as error:
            # Another profiler of this process.
            log.warning("train.profile: step %d is not recorded: %s", step, str(error)[:200])
            self._totals.steps.append(step)
            return
        self._profile = recording
        self._step = step
        self._recorded_s = 0.0

    def _write(self) -> None:
        """Stop recording the step under way, and write its trace."""
        recording = self._profile
        if recording is None or self._plan is None:
            return
        self._profile = None
        recording.stop()
        self._totals.steps.append(self._step)
        self._totals.add(recording.key_averages())
        path = self._plan.folder / f"{self._plan.name}-step-{self._step}.json.gz"
        partial = path.with_name(f".{path.name}")
        try:
            private_folder(path.parent)
            recording.export_chrome_trace(str(partial))
            size = partial.stat().st_size
            if size > MAX_TRACE_BYTES:
                partial.unlink()
                log.warning("train.profile: the trace of step %d is too large", self._step)
                return
            replace(partial, path)
        except (OSError, UserError) as error:
            log.warning("train.profile: %s is not written: %s", path, error)
            return
        log.info("train.profile: step %d is in %s, %d KiB", self._step, path, size >> 10)

    def _write_table(self, plan: ProfilePlan) -> None:
        lines = self._totals.table()
        for line in lines:
            log.info("train.profile: %s", line)
        path = plan.folder / f"{plan.name}.txt"
        try:
            private_folder(plan.folder)
            private_write(path, "\n".join([*lines, ""]).encode())
        except (OSError, UserError) as error:
            log.warning("train.profile: %s is not written: %s", path, error)
