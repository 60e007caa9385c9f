"""Sends the way of single tickets through the processes as OpenTelemetry traces, over OTLP and
HTTP.

Trace and root span have ids that follow from the run and the ticket's number, so that spans of
different processes meet in one trace although no message carries an id. The learner sends the root
span when a ticket ends. Where to send is up to the environment of each process, in OpenTelemetry's
own variables: ``OTEL_EXPORTER_OTLP_ENDPOINT`` and others.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from broker.errors import UserError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

log = logging.getLogger(__name__)

PACKAGES: Final = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
ROOT: Final = "ticket"
CLOSE_WITHIN_S: Final = 3.0
MAX_OPEN: Final = 4096  # sampled tickets of which the learner knows when they were granted


def trace_ids(run: str, ticket: int) -> tuple[int, int]:
    """Return the ids of a ticket's trace and of its root span."""
    digest = hashlib.sha256(f"rlearner/{run}/{ticket}".encode()).digest()
    return int.from_bytes(digest[:16], "big") or 1, int.from_bytes(digest[16:24], "big") or 1


class TicketTraces:
    """Sender of one process's spans; methods may be called from any thread, and never block or
    fail.

    Args:
        every: only tickets whose number is a multiple of this are traced, by all processes alike.
        exporter: where spans go; None: as the environment says.
    """

    def __init__(
        self, run: str, role: str, process_id: str, every: int, exporter: SpanExporter | None = None
    ) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

        class Ids(RandomIdGenerator):
            """Random ids, except those of root spans."""

            chosen: tuple[int, int] | None = None

            def generate_trace_id(self) -> int:
                return self.chosen[0] if self.chosen else super().generate_trace_id()

            def generate_span_id(self) -> int:
                return self.chosen[1] if self.chosen else super().generate_span_id()

        self._run = run
        self._every = every
        self._ids = Ids()
        self._lock = threading.Lock()
        about = {
            "service.name": f"rlearner-{role}",
            "service.instance.id": process_id,
            "rlearner.run": run,
        }
        provider = TracerProvider(
            resource=Resource.create(about), id_generator=self._ids, shutdown_on_exit=False
        )
        self._exporter: SpanExporter = exporter or OTLPSpanExporter()
        self._processor = BatchSpanProcessor(self._exporter)
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("rlearner")
        self._granted: dict[int, float] = {}

    def samples(self, ticket: int) -> bool:
        """Return whether a ticket is traced."""
        return ticket > 0 and ticket % self._every == 0

    def add(
        self, hop: str, ticket: int, start: float, end: float, **attributes: str | int | float
    ) -> None:
        """Send one hop of a ticket, if it is traced.

        Args:
            start: unix seconds.
            end: unix seconds; at least ``start``, which another host's clock may have written.
        """
        if not self.samples(ticket):
            return
        from opentelemetry import trace

        trace_id, root = trace_ids(self._run, ticket)
        flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
        parent = trace.NonRecordingSpan(
            trace.SpanContext(trace_id, root, is_remote=True, trace_flags=flags)
        )
        span_attributes: dict[str, str | int | float] = {
            f"rlearner.{name}": value for name, value in attributes.items()
        }
        span_attributes["rlearner.ticket"] = ticket
        context = trace.set_span_in_context(parent)
        with self._lock:
            span = self._tracer.start_span(
                hop, context, start_time=_nanoseconds(start), attributes=span_attributes
            )
        span.end(_nanoseconds(max(start, end)))

    def granted(self, ticket: int, at: float) -> None:
        """Note when a ticket was granted, at which its trace begins."""
        if self.samples(ticket) and len(self._granted) < MAX_OPEN:
            self._granted[ticket] = at

    def end(self, ticket: int, outcome: str) -> None:
        """Send the root span of a ticket; it begins now if another incarnation granted it."""
        if not self.samples(ticket):
            return
        from opentelemetry.context import Context

        now = time.time()
        start = self._granted.pop(ticket, now)
        span_attributes: dict[str, str | int] = {
            "rlearner.ticket": ticket,
            "rlearner.outcome": outcome,
        }
        with self._lock:
            self._ids.chosen = trace_ids(self._run, ticket)
            try:
                span = self._tracer.start_span(
                    ROOT, Context(), start_time=_nanoseconds(start), attributes=span_attributes
                )
            finally:
                self._ids.chosen = None
        span.end(_nanoseconds(now))

    def close(self) -> None:
        """Send what is left, for a few seconds at most."""
        for work, within_s in ((self._processor.force_flush, CLOSE_WITHIN_S), (self._end, 1.0)):
            thread = threading.Thread(target=work, name="traces", daemon=True)
            thread.start()
            thread.join(within_s)

    def _end(self) -> None:
        # it warns of the second call
        logging.getLogger(type(self._exporter).__module__).setLevel(logging.ERROR)
        self._exporter.shutdown()  # first: it ends the pauses between attempts
        self._processor.shutdown()  # type: ignore[no-untyped-call]


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def require_installed() -> None:
    """Check that OpenTelemetry's packages are there.

    Raises:
        UserError: if they are not.
    """
    if not is_installed():
        raise UserError(
            "telemetry.traces: OpenTelemetry is not installed; pip install 'rlearner[otel]', or set it to 0"
        )


def is_installed() -> bool:
    """Return whether the packages of the extra ``otel`` are there."""
    try:
        return (
            find_spec("opentelemetry.sdk") is not None
            and find_spec("opentelemetry.exporter.otlp.proto.http") is not None
        )
    except ModuleNotFoundError:
        return False


def open_traces(every: int, run: str, role: str, process_id: str) -> TicketTraces | None:
    """Return the sender of a process, None if no ticket is traced or the packages are missing here."""
    if not every:
        return None
    if not is_installed():
        log.warning(
            "telemetry.traces: OpenTelemetry is not installed here, so this process sends no spans"
        )
        return None
    log.info("tickets whose number is a multiple of %d are traced", every)
    return TicketTraces(run, role, process_id, every)
