"""What a process shows about itself on its page ``/metrics``."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Final, get_args

from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from broker.runtime.figures import ProcessFigures
from broker.runtime.health import Health, State
from broker.system import logs
from broker.telemetry.families import Families
from broker.telemetry.names import PREFIX
from broker.telemetry.page_metrics import PAGE_METRICS

LAG_EVERY_S: Final = 0.25
LAG_BUCKETS_S: Final = (0.005, 0.025, 0.1, 0.5, 2.0, 10.0, 60.0)
COUNTED: Final = ("published", "consumed", "redelivered", "acknowledged", "handed_back")


class ProcessCollector(Collector):
    """Asks a process for its figures at each scrape, from the thread that serves them.

    Args:
        figures: of the process.
        health: of the process.
        lag: of its event loop.
    """

    def __init__(self, figures: ProcessFigures, health: Health, lag: LoopLag) -> None:
        self._figures = figures
        self._health = health
        self._lag = lag

    def describe(self) -> Iterable[Metric]:
        """Return nothing: names are known only when the process reports them."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Return the families of all figures."""
        families = Families()
        labels = logs.identity()
        about = {
            "version": version("rlearner"),
            "host": socket.gethostname(),
            "pid": str(os.getpid()),
        }
        families.add("process_info", {**labels, **about}, 1.0)
        for state in get_args(State):
            is_current = float(self._health.state == state)
            families.add("process_state", {**labels, "state": state}, is_current)
        families.metrics(self._figures.values, labels)
        for (stream, subject), depth in self._figures.depths.items():
            queue_labels = {"run": labels["run"], "stream": stream, "subject": subject}
            families.add("queue_depth", queue_labels, depth)
        if (bus := self._figures.bus) is not None:
            for counter in COUNTED:
                for stream, count in dict(getattr(bus.counts, counter)).items():
                    stream_labels = {**labels, "stream": stream}
                    families.add(f"stream_messages_{counter}", stream_labels, count)
        return [*families.all(), self._lag.family(labels)]


class LoopLag:
    """Histogram of how much later than due the event loop runs a timer."""

    def __init__(self) -> None:
        self._counts = [0] * (len(LAG_BUCKETS_S) + 1)
        self._sum_s = 0.0

    async def measure(self) -> None:
        """Measure until cancelled."""
        while True:
            wake_at = time.monotonic() + LAG_EVERY_S
            await asyncio.sleep(LAG_EVERY_S)
            late_s = max(0.0, time.monotonic() - wake_at)
            self._counts[bisect_left(LAG_BUCKETS_S, late_s)] += 1
            self._sum_s += late_s

    def family(self, labels: Mapping[str, str]) -> Metric:
        """Return the histogram."""
        metric = PAGE_METRICS["event_loop_lag_seconds"]
        family = HistogramMetricFamily(
            f"{PREFIX}{metric.name}", metric.meaning, labels=tuple(labels)
        )
        buckets = list[tuple[str, float]]()
        total = 0
        for bound, count in zip(
            (*map(str, LAG_BUCKETS_S), "+Inf"), tuple(self._counts), strict=True
        ):
            total += count
            buckets.append((bound, float(total)))
        family.add_metric(tuple(labels.values()), buckets, self._sum_s)
        return family
