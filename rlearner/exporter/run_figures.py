"""What is known of a run, and its families for Prometheus. No I/O; read from another thread while
it changes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from broker.contract import wire
from broker.contract.streams import METRICS, ROLES, SAMPLES
from broker.jetstream.delivery import decode_message
from broker.runtime.figures import newest_values
from broker.runtime.presence import CENSUS_S
from broker.settings.run_settings import RunSettings, stored_value
from broker.telemetry.families import Families
from rlearner.advise.advice import desired_servers
from rlearner.advise.fit import NotFitted, fit_run
from rlearner.advise.follow import StepHistory

log = logging.getLogger(__name__)

# after which the metrics of a process are no longer shown; it reports every second
SILENT_S: Final = 10.0
STALE_S: Final = 20.0  # after which what the broker said is no longer shown; it is asked every five
STATES: Final = ("starting", "ready", "draining", "failed")


@dataclass(frozen=True)
class Queue:
    """A subject of a work queue."""

    stream: str
    subject: str
    pending: int  # not delivered yet
    held: int  # delivered and not acknowledged
    redelivered: int  # of those held, delivered more than once
    waiting_pulls: int  # requests of processes that wait for messages


@dataclass(frozen=True)
class BrokerFigures:
    """One answer of the broker."""

    queues: list[Queue] = field(default_factory=list)
    messages: Mapping[str, int] = field(default_factory=dict)  # by stream
    sizes: Mapping[str, int] = field(default_factory=dict)  # bytes by stream
    dead: Mapping[str, int] = field(default_factory=dict)  # dead letters by stream
    store_bytes: int = 0  # used of the broker's store, by all runs
    store_limit_bytes: int | None = None  # None: unknown
    desired: str = "running"
    spec: wire.RunSpec | None = None
    offer: wire.WeightsOffer | None = None


class RunFigures(Collector):
    """Everything that the exporter shows.

    Args:
        clock: seconds, monotonic.

    Attributes:
        is_connected: whether the connection to the broker is up.
    """

    def __init__(self, run: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._run = run
        self._clock = clock
        self._alive: Callable[[], Iterable[wire.Presence]] = list
        self._heard_from = float("inf")
        self.is_connected = False
        # newest message by subject, decoded when it is asked for
        self._raw: dict[str, tuple[float, bytes]] = {}
        self._learner: dict[str, tuple[float, dict[str, float]]] = {}  # by id
        self._broker = BrokerFigures()
        self._broker_at = -STALE_S
        self._asked_at = 0.0
        self._malformed = self._failures = 0
        self._history = StepHistory()
        self._desired_servers: int | None = None  # until enough steps are known

    def listen(self, alive: Callable[[], Iterable[wire.Presence]]) -> None:
        """Show the processes that are heard, once all have had time to be."""
        self._alive, self._heard_from = alive, self._clock() + CENSUS_S

    def hear(self, subject: str, data: bytes) -> None:
        """Take a message with metrics."""
        if subject.split(".")[-2] != "learner":
            self._raw[subject] = (self._clock(), data)
            return
        message, _ = decode_message(data, METRICS.messages)
        if not isinstance(message, wire.Metrics):
            self._malformed += 1
            return
        _, old_values = self._learner.get(message.id, (0.0, {}))
        self._learner[message.id] = (self._clock(), newest_values(old_values, message.values))
        self._history.take(message.values)

    def answer(self, figures: BrokerFigures) -> None:
        """Take what the broker answered."""
        self._broker, self._broker_at, self._asked_at = figures, self._clock(), time.time()

    def advise(self) -> None:
        """Compute how many servers the run can use, if new steps say so; takes a second, from any
        thread.
        """
        spec = self._broker.spec
        rows = self._history.due()
        if spec is None or not rows:
            return
        began = time.monotonic()
        try:
            self._desired_servers = desired_servers(
                fit_run(rows, RunSettings.of_config(spec.config)).model
            )
        except NotFitted:
            self._desired_servers = None
        except Exception:
            log.exception("no advice from these steps")  # it may cost a figure, never the others
            self._desired_servers = None
        finally:
            self._history.computed(time.monotonic() - began)

    def fail(self) -> None:
        """Note that the broker did not answer."""
        self._failures += 1

    def forget_silent(self) -> None:
        """Drop the metrics of processes that have left."""
        since = self._clock() - SILENT_S
        for values_by_process in (self._raw, self._learner):
            for key in [key for key, (at, _) in list(values_by_process.items()) if at < since]:
                values_by_process.pop(key, None)  # a scrape, in another thread, may have dropped it

    def describe(self) -> Iterable[Metric]:
        """Return nothing: names are known only when processes report them."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Return the families of all figures."""
        families = Families()
        run = {"run": self._run}
        is_fresh = self._clock() - self._broker_at < STALE_S
        families.add("exporter_up", run, float(self.is_connected and is_fresh))
        families.add("exporter_last_answer_timestamp_seconds", run, self._asked_at)
        families.add("exporter_failures", run, self._failures)
        values = self._values()
        families.add("exporter_malformed", run, self._malformed)
        for role, process_id, own in values:
            families.metrics(own, {**run, "role": role, "id": process_id})
        if self.is_connected and self._clock() >= self._heard_from:
            self._processes(families)
        if is_fresh:
            learners = [own for role, _, own in values if role == "learner"]
            if learners and self._desired_servers is not None:
                families.add("desired_servers", run, self._desired_servers)
            self._queues(families, learners[0].get("queue/samples/depth") if learners else None)
            self._run_itself(families)
        return families.all()

    def _values(self) -> list[tuple[str, str, dict[str, float]]]:
        """Return role, id and metrics of each process that reports."""
        since = self._clock() - SILENT_S
        sources = [
            ("learner", process_id, own)
            for process_id, (at, own) in list(self._learner.items())
            if at >= since
        ]
        for subject, (at, data) in list(self._raw.items()):
            message, _ = decode_message(data, METRICS.messages)
            if isinstance(message, wire.Metrics):
                # which the broker lets only this process use
                role, process_id = subject.split(".")[-2:]
                sources += [(role, process_id, message.values)] if at >= since else []
            else:
                self._malformed += 1
                self._raw.pop(subject, None)
        return sources

    def _processes(self, families: Families) -> None:
        """Add what processes announce."""
        living = list(self._alive())
        for role in ROLES:
            count = sum(presence.role == role for presence in living)
            families.add("processes", {"run": self._run, "role": role}, count)
        for presence in living:
            labels_of_process = {"run": self._run, "role": presence.role, "id": presence.id}
            about = {
                "host": presence.host,
                "engine": presence.engine,
                "policy": presence.policy if presence.role == "rollout" else "",
            }
            families.add("member_info", {**labels_of_process, **about}, 1.0)
            state = {"serving": "ready"}.get(presence.state, presence.state)
            for lifecycle in STATES:
                state_labels = {**labels_of_process, "state": lifecycle}
                families.add("member_state", state_labels, float(lifecycle == state))
            for name, value in {
                "member_slots": presence.slots,
                "member_running": presence.running,
                "member_waiting": presence.waiting,
                "member_policy_version": presence.policy_version,
                "member_problem": float(bool(presence.problem)),
            }.items():
                families.add(name, labels_of_process, value)

    def _queues(self, families: Families, unread: float | None) -> None:
        broker = self._broker
        for queue in broker.queues:
            queue_labels = {"run": self._run, "stream": queue.stream, "subject": queue.subject}
            for name, value in {
                "queue_depth": queue.pending + queue.held,
                "queue_pending": queue.pending,
                "queue_held": queue.held,
                "queue_redelivered": queue.redelivered,
                "queue_waiting_pulls": queue.waiting_pulls,
            }.items():
                families.add(name, queue_labels, value)
        if unread is not None:
            queue_labels = {
                "run": self._run,
                "stream": SAMPLES.name,
                "subject": SAMPLES.subject(self._run),
            }
            families.add("queue_depth", queue_labels, unread)
        for name, by_stream in {
            "stream_messages": broker.messages,
            "stream_bytes": broker.sizes,
            "dead_letters": broker.dead,
        }.items():
            for stream, value in by_stream.items():
                families.add(name, {"run": self._run, "stream": stream}, value)

    def _run_itself(self, families: Families) -> None:
        broker = self._broker
        run = {"run": self._run}
        families.add("jetstream_store_bytes", run, broker.store_bytes)
        if broker.store_limit_bytes is not None:
            families.add("jetstream_store_limit_bytes", run, broker.store_limit_bytes)
        for state in ("running", "paused", "draining", "stopped"):
            families.add("run_desired", {**run, "state": state}, float(broker.desired == state))
        if broker.spec is not None:
            families.add("run_epoch", run, broker.spec.epoch)
            for key in ("steps", "max_staleness"):
                value = stored_value(broker.spec.config, "train", key)
                if isinstance(value, int | float):
                    families.add(f"run_{key}", run, value)
        if broker.offer is not None:
            families.add("weights_offer_version", run, broker.offer.version)
            families.add("weights_offer_epoch", run, broker.offer.epoch)
            families.add("weights_offer_bytes", run, broker.offer.size_bytes)
