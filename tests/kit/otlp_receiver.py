"""A receiver of OpenTelemetry's protocol over HTTP: what a collector would get."""

from __future__ import annotations

import gzip
import threading
from collections import defaultdict
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class ReceivedSpan:
    """One span; times are unix seconds, ids are hex."""

    name: str
    service: str
    trace: str
    span: str
    parent: str
    start: float
    end: float
    attributes: dict[str, Any]


class OtlpReceiver:
    """Collects spans while the context is open."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                assert (self.path, self.headers["Content-Type"]) == (
                    "/v1/traces",
                    "application/x-protobuf",
                )
                receiver._take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> OtlpReceiver:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _take(self, request: ExportTraceServiceRequest) -> None:
        for of_process in request.resource_spans:
            about = {one.key: _value(one.value) for one in of_process.resource.attributes}
            for scope in of_process.scope_spans:
                for one in scope.spans:
                    given = {pair.key: _value(pair.value) for pair in one.attributes}
                    ids = one.trace_id.hex(), one.span_id.hex(), one.parent_span_id.hex()
                    times = one.start_time_unix_nano / 1e9, one.end_time_unix_nano / 1e9
                    self.spans.append(
                        ReceivedSpan(one.name, about["service.name"], *ids, *times, given)
                    )

    def traces(self) -> dict[str, list[ReceivedSpan]]:
        """Return the spans of each trace."""
        found: dict[str, list[ReceivedSpan]] = defaultdict(list)
        for span in list(self.spans):
            found[span.trace].append(span)
        return found


def _value(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))
