"""Writes one line of metrics per step to metrics.jsonl, the trackers and the live view."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

from broker.contract import wire
from broker.contract.streams import EPISODES, EVALTICKETS, SAMPLES, TICKETS
from broker.contract.wire import ACTOR
from broker.jetstream.bus import Bus
from broker.jetstream.core_messages import publish_metrics
from broker.runtime.presence import Roster
from broker.runtime.process import Stop
from broker.system.processor_use import ProcessorUse
from broker.system.recent_warning import forget_warning
from learner.credit.ledger import Ledger
from learner.disk_retry import DiskRetry
from learner.reporting.fleet_figures import NAMES, fleet_figures
from learner.reporting.metrics import (
    MetricsFile,
    count_tickets,
    curriculum_metrics,
    evaluations_since,
    finite_values,
    values_by_step,
)
from learner.reporting.showcase import EpisodeShowcase
from learner.reporting.trackers import TrackerGroup
from learner.reporting.training_signals import TrainingWarnings

log = logging.getLogger(__name__)

SAMPLE_EVERY_S: Final = 1.0
QUEUES: Final = (TICKETS, EPISODES, EVALTICKETS)


class MetricsWriter:
    """Writer of the run's metrics.

    Args:
        last_step: steps whose lines stay in the file; later ones are written again.
        stop: ends a wait for space.
        say: receives a text when the file cannot be written, and an empty one when it can again.
    """

    def __init__(
        self,
        bus: Bus,
        roster: Roster,
        ledger: Ledger,
        trackers: TrackerGroup,
        showcase: EpisodeShowcase,
        path: Path,
        last_step: int,
        stop: Stop,
        say: Callable[[str], None],
    ) -> None:
        self._bus = bus
        self._roster = roster
        self._ledger = ledger
        self._trackers = trackers
        self._figures = stop.figures
        self.showcase = showcase
        self._path = path
        self._file = MetricsFile(path, last_step)
        self._disk_retry = DiskRetry(path.parent, stop, "training waits", say)
        self._depths = {f"queue/{stream.name}/depth": 0.0 for stream in (*QUEUES, SAMPLES)}
        self._signals = TrainingWarnings()
        self._processor_use = ProcessorUse()
        self.newest: dict[str, float] = {}  # the newest line
        # of the newest failed group: the reason, and the process that closed it
        self.failure: dict[str, str] = {}

    def services(self) -> list[Coroutine[Any, Any, None]]:
        """Return the coroutines that sample the queues, each until cancelled."""
        return [self._sample()]

    def compose(self, values: dict[str, float]) -> dict[str, float]:
        """Return a step's line without its evaluation."""
        version = float(self._ledger.state.version)
        head = {"step": version, "policy_version": version, "time": time.time()}
        fleet = {"rollouter/idle_ratio": self._idle_ratio()}
        hosts = {socket.gethostname()}
        for role in NAMES:
            present = self._roster.alive(role)
            fleet |= fleet_figures(role, present)
            hosts |= {process.host for process in present}
        fleet |= {"fleet/hosts": float(len(hosts))} | self._processor_use.figures()
        tickets = count_tickets(self._ledger) | curriculum_metrics(self._ledger)
        return head | finite_values(values) | tickets | fleet | self._depths

    def evaluations_since(self, step: int) -> set[tuple[str, int]]:
        """Return (policy, step) of the evaluations in lines of this step or later; reads a file."""
        return evaluations_since(self._path, step)

    async def write(self, line: dict[str, float]) -> None:
        """Write a composed line to the file, the trackers, the log and the live view."""
        step = int(line["step"])
        row: dict[str, Any] = line | {"step": step, "policy_version": step}
        row |= {name: int(value) for name, value in line.items() if name.startswith("ticket/")}
        await self._disk_retry.in_thread(self._file.write, row)
        for label, values in values_by_step(line).items():
            await asyncio.to_thread(self._trackers.log, label, values)
        await asyncio.to_thread(self.showcase.step_completed, step)
        self.newest = line
        metric_of = {
            "reward": "reward/mean",
            "success": "env/success_rate",
            "staleness": "staleness/max",
            "evaluated": "eval/success_rate",
            "evaluated_after_step": "eval/step",
        }
        extra = {name: round(line[key], 3) for name, key in metric_of.items() if key in line}
        log.info("step %d of %d", step, self._ledger.rules.steps, extra=extra)
        new_warnings, ended_warnings = self._signals.take(line)
        for text in new_warnings:
            log.warning("%s", text)
        for text in ended_warnings:
            log.info("no longer: %s", text)
        if ended_warnings and not self._signals.active:
            forget_warning(log)
        message = wire.Metrics(role="learner", id=self._bus.name, time=line["time"], values=line)
        await publish_metrics(self._bus, message)

    def close(self) -> None:
        self._file.close()

    def _idle_ratio(self) -> float:
        """Return the mean over the actor's servers; 1 if none has reported."""
        ratios = [
            server.idle_ratio
            for server in self._roster.alive("rollout")
            if server.policy == ACTOR and server.idle_ratio >= 0
        ]
        return sum(ratios) / len(ratios) if ratios else 1.0

    async def _sample(self) -> None:
        while True:
            # An empty queue is 0, not absent.
            by_subject = dict.fromkeys(self._figures.depths, 0.0)
            for stream in QUEUES:
                depth = await self._bus.depth(stream)
                self._depths[f"queue/{stream.name}/depth"] = float(sum(depth.values()))
                subjects = {key: stream.subject(self._bus.run, key) for key in depth}
                by_subject |= {
                    (stream.name, subjects[key]): float(count) for key, count in depth.items()
                }
            behind = max(0, await self._bus.last_seq(SAMPLES) - self._ledger.state.position)
            self._depths["queue/samples/depth"] = float(behind)
            by_subject[SAMPLES.name, SAMPLES.subject(self._bus.run)] = float(behind)
            self._figures.depths = by_subject
            await asyncio.sleep(SAMPLE_EVERY_S)
