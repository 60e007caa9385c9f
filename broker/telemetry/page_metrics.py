"""Declarations of the metrics that only the pages /metrics of processes and the exporter show.

Their names lack ``rlearner_`` and the ``_total`` of a counter. All have the label ``run``.
"""

from __future__ import annotations

from typing import Final

from broker.telemetry.declarations import MetricDeclaration as Metric
from broker.telemetry.declarations import Source

PAGE: Final[tuple[Source, ...]] = ("page",)
EXPORTER: Final[tuple[Source, ...]] = ("exporter",)
PROCESS: Final = ("role", "id")
QUEUE: Final = ("stream", "subject")

# One row a metric, so that the table can be read as a table.
# fmt: off
_TABLE: Final = (
    Metric("process_info", "", PAGE, "Always 1; what the process is.",
           labels=(*PROCESS, "host", "pid", "version")),
    Metric("process_state", "", PAGE, "1 for the state that the process is in, 0 for the others.",
           labels=(*PROCESS, "state")),
    *(
        Metric(f"stream_messages_{name}", "messages", PAGE, text, kind="counter",
               labels=(*PROCESS, "stream"))
        for name, text in (
            ("published", "Messages that this process stored in a stream."),
            ("consumed", "Messages that this process received from a queue or read from a log."),
            ("redelivered", "Received messages that had been delivered before, to any process."),
            ("acknowledged", "Messages of a queue that this process ended."),
            ("handed_back", "Messages that this process returned to their queue."),
        )
    ),
    Metric("event_loop_lag_seconds", "seconds", PAGE,
           "How late the event loop ran a timer, in seconds.", kind="histogram", labels=PROCESS),
    Metric("exporter_up", "", EXPORTER,
           "1 while the broker is connected and answers for the run, else 0: other figures of it "
           "are then absent.", title="broker answers"),
    Metric("exporter_last_answer_timestamp_seconds", "unix seconds", EXPORTER,
           "When the broker last answered."),
    Metric("exporter_failures", "", EXPORTER, "Rounds of questions without an answer.",
           kind="counter"),
    Metric("exporter_malformed", "messages", EXPORTER, "Messages with metrics that did not decode.",
           kind="counter"),
    Metric("processes", "processes", EXPORTER, "Processes of the run that are heard.",
           title="processes", labels=("role",)),
    Metric("member_info", "", EXPORTER, "Always 1; what the process is.",
           labels=(*PROCESS, "host", "engine", "policy")),
    Metric("member_state", "", EXPORTER,
           "1 for the state that the process is in, 0 for the others.",
           labels=(*PROCESS, "state")),
    Metric("member_slots", "groups or requests", EXPORTER,
           "Requests or groups that it handles at once.", title="slots", labels=PROCESS),
    Metric("member_running", "groups or requests", EXPORTER, "Requests or groups that it handles.",
           title="running", labels=PROCESS),
    Metric("member_waiting", "groups or requests", EXPORTER, "Requests or groups that wait in it.",
           title="waiting", labels=PROCESS),
    Metric("member_policy_version", "version", EXPORTER, "Newest version that it holds, -1 none.",
           title="policy version", labels=PROCESS),
    Metric("member_problem", "", EXPORTER, "1 while it takes no work, for a reason.",
           title="take no work", labels=PROCESS),
    Metric("queue_depth", "messages", (*PAGE, *EXPORTER),
           "Messages of a queue that are not acknowledged; of samples: those the learner has not "
           "read.", title="queue depth", labels=QUEUE),
    Metric("queue_pending", "messages", EXPORTER, "Messages of a queue that no process has yet.",
           title="not delivered yet", labels=QUEUE),
    Metric("queue_held", "messages", EXPORTER,
           "Messages that a process has and did not acknowledge.", title="held by a process",
           labels=QUEUE),
    Metric("queue_redelivered", "messages", EXPORTER,
           "Held messages that were delivered more than once.", title="redelivered", labels=QUEUE),
    Metric("queue_waiting_pulls", "requests", EXPORTER,
           "Requests of processes that wait for messages of this queue.",
           title="processes that wait for messages", labels=QUEUE),
    Metric("stream_messages", "messages", EXPORTER, "Messages kept.", title="messages by stream",
           labels=("stream",)),
    Metric("stream_bytes", "bytes", EXPORTER, "Bytes kept, in one replica.",
           title="bytes by stream", labels=("stream",)),
    Metric("dead_letters", "messages", EXPORTER,
           "Messages that no process could use, by the stream they came from.",
           title="dead letters", labels=("stream",)),
    Metric("jetstream_store_bytes", "bytes", EXPORTER,
           "Bytes used of the broker's store, by all runs.", title="store"),
    Metric("jetstream_store_limit_bytes", "bytes", EXPORTER,
           "Bytes that the account or broker.store_max_gib allows; absent without either."),
    Metric("run_desired", "", EXPORTER,
           "1 for the state that the operator wants for the run, 0 for the others.",
           labels=("state",)),
    Metric("run_epoch", "", EXPORTER, "Incarnation of the learner."),
    Metric("run_steps", "steps", EXPORTER, "Steps to train (train.steps)."),
    Metric("run_max_staleness", "versions", EXPORTER,
           "Versions that a token may lag behind (train.max_staleness)."),
    Metric("weights_offer_version", "version", EXPORTER, "Policy version on offer."),
    Metric("weights_offer_epoch", "", EXPORTER, "Epoch of the offer."),
    Metric("weights_offer_bytes", "bytes", EXPORTER, "Bytes of the offered weights."),
    Metric("desired_servers", "processes", EXPORTER,
           "Fewest rollout servers of the present speed with 95 % of the samples/s that any number "
           "reaches."),
)
# fmt: on
PAGE_METRICS: Final = {metric.name: metric for metric in _TABLE}
