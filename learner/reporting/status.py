"""Publishes the learner's status: its presence, its newest metrics, its current phase."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

from broker.contract import wire
from broker.runtime.process import Stop
from broker.system.batch_job import batch_job
from broker.system.disk_space import disk_figures
from broker.system.process_identity import this_process
from learner.credit.ledger import Ledger
from learner.reporting.metrics import count_tickets
from learner.reporting.metrics_writer import MetricsWriter

log = logging.getLogger(__name__)

ID: Final = "learner"


class LearnerStatus:
    """Status of the learner, read by presence, metrics and the live view.

    Args:
        slots: groups of a step.
        epoch: returns the epoch of this incarnation, 0 before it has taken one.
        folder: of the run, whose disk may fill.
    """

    def __init__(self, stop: Stop, slots: int, epoch: Callable[[], int], folder: Path) -> None:
        self._stop = stop
        self._slots = slots
        self._epoch = epoch
        self._folder = folder
        self.phase = "starting"  # current activity, for users
        self.serving = False  # whether it trains, or is about to
        self.ledger: Ledger | None = None  # set once it is loaded
        self.metrics_writer: MetricsWriter | None = None  # set once it is open

    def presence(self) -> wire.Presence:
        """Return the learner's presence."""
        state: Literal["starting", "serving", "draining"] = "starting"
        if self._stop.asked.is_set():
            state = "draining"
        elif self.serving:
            state = "serving"
        return wire.Presence(
            role="learner",
            id=ID,
            host=socket.gethostname(),
            pid=os.getpid(),
            state=state,
            epoch=self._epoch(),
            policy_version=self.ledger.state.version if self.ledger else -1,
            running=len(self.ledger.state.taken) if self.ledger else 0,
            waiting=len(self.ledger.waiting_for) if self.ledger else 0,
            slots=self._slots,
            process=this_process(),
            job=batch_job(),
        )

    def values(self) -> dict[str, float]:
        """Return the newest line, repeated for late subscribers, with current ticket counts."""
        line = self.metrics_writer.newest if self.metrics_writer else {}
        if self.ledger:
            line = line | count_tickets(self.ledger)
        return line | disk_figures(self._folder)

    def text(self) -> dict[str, str]:
        """Return the texts that go with the values."""
        return {"phase": self.phase} | (self.metrics_writer.failure if self.metrics_writer else {})

    def say(self, phase: str) -> None:
        """Log and show a new phase; from any thread."""
        self.phase = phase
        log.info("%s", phase)

    def say_waiting(self, waits: str) -> None:
        """Show what training waits for, "training" if ``waits`` is empty; the caller logs it."""
        if self.serving:
            self.phase = waits or "training"
