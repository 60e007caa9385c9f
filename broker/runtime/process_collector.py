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
from broker.telemetry.families import QUEUE_DEPTH, QUEUE_DEPTH_HELP, Families

LAG_EVERY_S: Final = 0.25
LAG_BUCKETS_S: Final = (0.005, 0.025, 0.1, 0.5, 2.0, 10.0, 60.0)
STATE_HELP: Final = "1 for the state that the process is in, 0 for the others."
MESSAGE_COUNTS: Final = {
    "published": "Messages that this process stored in a stream.",
    "consumed": "Messages that this process received from a queue or read from a log.",
    "redelivered": "Received messages that had been delivered before, to any process.",
    "acknowledged": "Messages of a queue that this process ended.",
    "handed_back": "Messages that this process returned to their queue.",
}


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
        families.gauge("process_info", "Always 1; what the process is.", {**labels, **about}, 1.0)
        for state in get_args(State):
            is_current = float(self._health.state == state)
            families.gauge("process_state", STATE_HELP, {**labels, "state": state}, is_current)
        families.metrics(self._figures.values, labels)
        for (stream, subject), depth in self._figures.depths.items():
            queue_labels = {"run": labels["run"], "stream": stream, "subject": subject}
            families.gauge(QUEUE_DEPTH, QUEUE_DEPTH_HELP, queue_labels, depth)
        if (bus := self._figures.bus) is not None:
            for counter, text in MESSAGE_COUNTS.items():
                for stream, count in dict(getattr(bus.counts, counter)).items():
                    families.counter(
                        f"stream_messages_{counter}", text, {**labels, "stream": stream}, count
                    )
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
        text = "How late the event loop ran a timer, in seconds."
        family = HistogramMetricFamily(
            "rlearner_event_loop_lag_seconds", text, labels=tuple(labels)
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
