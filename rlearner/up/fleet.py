"""Runs the child processes of ``rlearner up``, each in a session that ends with this process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from broker.errors import UserError
from broker.system.children import spawn
from broker.system.entry import EXIT_STOPPED, EXIT_USER_ERROR
from broker.system.log_rotation import OUTPUT
from broker.system.logs import error_of
from broker.system.work_clock import WorkClock
from rlearner.up.event_log import ProcessEvent
from rlearner.up.processor_times import ProcessorTimes

# Doubled at every restart that did not last a minute.
RESTART_AFTER_S = 1.0
RESTART_AT_MOST_S = 30.0
# Quick exits in a row; by then the delays have added up to a minute.
GIVE_UP_AFTER = 6
# Characters of a log's last line, so that an event stays one line.
MAX_REASON_CHARS = 200
# Between two looks at whether children that end wait for a processor.
LOOK_EVERY_S = 0.5
# Between two samples of processor time.
SAMPLE_EVERY_S = 1.0
# Done, or stopped on request.
ENDED_WELL = (0, EXIT_STOPPED)


@dataclass
class FleetProcess:
    """One process of the fleet."""

    name: str  # role, or role and number: the name of its log file
    module: str  # run as ``python -m module``
    args: list[str]
    log: Path
    nice: int = 0
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    restarts: int = 0
    not_before: float = 0.0
    exit_code: int | None = None  # of a child that is not restarted
    # pid -> processor seconds, with the children it waited for
    cpu: dict[int, float] = field(default_factory=dict)

    @property
    def pid(self) -> int:
        return self.process.pid if self.process else 0

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def reason(self) -> str:
        """The last line of its log, after a colon; the log of a crash ends with its traceback."""
        last = next((line.strip() for line in reversed(self.last_lines()) if line.strip()), "")
        return f": {last[:MAX_REASON_CHARS]}" if last else ""

    def last_lines(self, count: int = 5) -> list[str]:
        """Return the last lines of its log."""
        with contextlib.suppress(OSError):
            return self.log.read_text(errors="replace").splitlines()[-count:]
        return []


@dataclass
class ProcessFleet:
    """All child processes. One that exits with 0, 2 or 130 is not restarted."""

    logs: Path
    env: dict[str, str]
    children: list[FleetProcess] = field(default_factory=list)
    sampled_at: float = 0.0  # when the processor time was taken
    times: ProcessorTimes = field(default_factory=ProcessorTimes)

    def add(self, name: str, module: str, args: Sequence[str], *, nice: int = 0) -> FleetProcess:
        """Start one child with its output in ``<logs>/<name>.log``; ``nice``: see ``spawn``."""
        child = FleetProcess(name, module, list(args), self.logs / f"{name}.log", nice)
        self.children.append(child)
        self._start(child)
        return child

    def _start(self, child: FleetProcess) -> None:
        self.logs.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", child.module, *child.args]
        with child.log.open("ab") as log:
            # The child rotates the file behind its own output.
            output = {OUTPUT: str(child.log.absolute())}
            child.process = spawn(
                command, log, env={**os.environ, **self.env, **output}, nice=child.nice
            )
        child.started_at = time.monotonic()

    def watch(self) -> list[ProcessEvent]:
        """Restart children that died, and return one line for each event."""
        events: list[ProcessEvent] = []
        now = time.monotonic()
        self._sample(now)
        for child in self.children:
            if child.exit_code is not None or child.running:
                continue
            code = child.process.returncode if child.process else 0
            is_quick = now - child.started_at < 60
            if code in (*ENDED_WELL, EXIT_USER_ERROR):
                child.exit_code = code
                events.append(
                    ProcessEvent(f"{child.name} ended with exit code {code}", "stop", child.name)
                )
            elif is_quick and child.restarts >= GIVE_UP_AFTER:
                child.exit_code = code
                line = (
                    f"{child.name} died {child.restarts} times in a row; giving up, see {child.log}"
                )
                events.append(ProcessEvent(line, "death", child.name))
            elif child.not_before == 0.0:
                child.restarts = child.restarts + 1 if is_quick else 1
                delay = min(RESTART_AFTER_S * 2 ** (child.restarts - 1), RESTART_AT_MOST_S)
                child.not_before = now + delay
                cause = f"with exit code {code}{child.reason}"
                if code < 0:
                    cause = f"by {signal.Signals(-code).name}"
                line = (
                    f"{child.name} (pid {child.pid}) died {cause}; "
                    f"starting it again in {delay:.0f} s"
                )
                events.append(ProcessEvent(line, "death", child.name))
            elif now >= child.not_before:
                child.not_before = 0.0
                self._start(child)
                events.append(
                    ProcessEvent(
                        f"{child.name} started again as pid {child.pid}", "start", child.name
                    )
                )
        return events

    def _sample(self, now: float) -> None:
        """Record the processor time so far; time after the last sample of a process is lost."""
        if now - self.sampled_at < SAMPLE_EVERY_S:
            return
        self.sampled_at = now
        living = {child.pid: child for child in self.children if child.running}
        for pid, seconds in self.times.read(living).items():
            living[pid].cpu[pid] = seconds

    def stop(
        self,
        first: Sequence[str] = (),
        *,
        patience_s: float = 20.0,
        show: Callable[[Sequence[str], float], None] = lambda waiting, left_s: None,
    ) -> None:
        """Stop all children, those in ``first`` before the others: SIGTERM, SIGTERM again, SIGKILL.

        Args:
            patience_s: on their own clocks: a loaded machine must not cost the last checkpoint.
            show: called often with the names that still run, and the seconds until SIGTERM again.
        """
        leading = [child for child in self.children if child.name in first]
        for batch in (leading, self.children):
            for signum, wait_s in (
                (signal.SIGTERM, patience_s),
                (signal.SIGTERM, 3.0),
                (signal.SIGKILL, 3.0),
            ):
                alive = [child for child in batch if child.running]
                for child in alive:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child.pid, signum)
                began = looked_at = time.monotonic()
                clocks = {child.name: WorkClock(child.pid) for child in alive}
                while time.monotonic() < began + wait_s:
                    waiting = [child.name for child in alive if child.running]
                    if not waiting:
                        break
                    if time.monotonic() > looked_at + LOOK_EVERY_S:
                        # The time that every child waited for a processor does not count.
                        began += min(clocks[name].look() for name in waiting)
                        looked_at = time.monotonic()
                    left_s = 0.0
                    if wait_s == patience_s:
                        left_s = patience_s - (time.monotonic() - began)
                    show(waiting, left_s)
                    time.sleep(0.05)

    def kill(self) -> None:
        """Kill all children at once."""
        for child in self.children:
            if child.running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)

    @property
    def failed(self) -> bool:
        """Whether a child rejected its input or died too often."""
        return any(child.exit_code not in (None, *ENDED_WELL) for child in self.children)

    def raise_for_failures(self) -> None:
        """Raise the error of a child that cannot run.

        Raises:
            UserError: if a child rejected its input (its own message), or died too often (its log).
        """
        for child in self.children:
            errors = [error for line in child.last_lines() if (error := error_of(line))]
            if child.exit_code == EXIT_USER_ERROR and errors:
                raise UserError(f"{child.name}: {errors[-1]}")
        for child in self.children:
            if child.exit_code not in (None, *ENDED_WELL):
                last = " ".join(child.last_lines(1))
                raise UserError(
                    f"{child.name} died with exit code {child.exit_code}: {last} (see {child.log})"
                )
