"""Every stream, as data. The code runs on this table, docs/wire.md is generated from it, a golden test freezes it.

Nothing else may name a subject, a stream, a consumer or a bucket.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from broker.contract import wire
from broker.errors import ConfigError


class StreamKind(Enum):
    """How a stream delivers."""

    WORK_QUEUE = "work queue: each message to one consumer, kept until acknowledged"
    LOG = "log: read in order from any position, kept until trimmed"
    LAST_VALUE = "last value: only the newest message of a key is kept"
    REQUEST = "request/reply: not kept, retried by the asker"
    BEST_EFFORT = "best effort: plain publish, lost when nobody listens"
    KV = "key-value: last value of each key, compare-and-swap"


@dataclass(frozen=True)
class Stream:
    """One row of the table.

    Attributes:
        name: short name, the second part of the subject.
        kind: how it delivers.
        messages: what it carries; empty: bytes that are a message only together.
        key: what the last parts of the subject mean, with dots between them; empty when there are none.
        writer: who writes.
        reader: who reads.
        kept: until when, in words.
        ttl_s: seconds after which a key-value entry expires, 0 never.
        max_bytes: most bytes kept, 0 unbounded.
        essential: stored although the broker is full, at the cost of the run's reserve; small and rare messages only.
        memory: kept in the broker's memory, so that a full disk does not stop it; gone when the broker restarts.
    """

    name: str
    kind: StreamKind
    messages: tuple[type[wire.Message], ...]
    key: str
    writer: str
    reader: str
    kept: str
    ttl_s: float = 0.0
    max_bytes: int = 0
    essential: bool = False
    memory: bool = False

    def subject(self, run: str, key: str = "") -> str:
        """The subject for one run and key, for example ``rl.demo.tickets.lake``."""
        tokens = key.split(".", self.key.count(".")) if self.key else []
        return ".".join(["rl", token(run, "run"), self.name, *(token(one, self.name) for one in tokens)])

    def all_subjects(self, run: str, *first: str) -> str:
        """The subject pattern that matches every key, or every key whose first parts are these; an empty one is left
        out.
        """
        first = tuple(filter(None, first))
        free = self.key.count(".") + 1 - len(first) if self.key else 0
        return ".".join(["rl", token(run, "run"), self.name, *(token(one, self.name) for one in first), *["*"] * free])

    def stream_name(self, run: str) -> str:
        """JetStream's name of the stream (or of the bucket, for KV)."""
        return f"rl_{token(run, 'run')}_{self.name}" if self.kind is not StreamKind.KV else f"rl_{self.name}"


TICKETS: Final = Stream(
    "tickets", StreamKind.WORK_QUEUE, (wire.Ticket,), "domain", "learner", "envhub", "until acknowledged"
)
EPISODES: Final = Stream(
    "episodes",
    StreamKind.WORK_QUEUE,
    (wire.Group, wire.Parted),
    "pool",
    "envhub, rewardhub",
    "rewardhub",
    "until acknowledged",
)
SAMPLES: Final = Stream(
    "samples",
    StreamKind.LOG,
    (wire.Group, wire.Closed, wire.Parted, wire.RulesChange),
    "",
    "rewardhub, envhub, learner",
    "learner",
    "until every kept checkpoint covers it",
)
PARTS: Final = Stream(
    "parts",
    StreamKind.LOG,
    (),
    "kind.ticket.upload.part",
    "envhub, rewardhub",
    "rewardhub, learner",
    "until their ticket has ended for good",
)
EVALTICKETS: Final = Stream(
    "evaltickets", StreamKind.WORK_QUEUE, (wire.EvalTicket,), "domain", "learner", "envhub", "until acknowledged"
)
EVALS: Final = Stream(
    "evals",
    StreamKind.LOG,
    (wire.Group, wire.Closed, wire.Parted),
    "",
    "rewardhub, envhub",
    "learner",
    "the run's life, bounded",
    max_bytes=1 << 28,
)
WEIGHTS: Final = Stream(
    "weights", StreamKind.LAST_VALUE, (wire.WeightsOffer,), "", "learner", "rollout", "last value", essential=True
)
WEIGHTSYNC: Final = Stream(
    "weightsync", StreamKind.REQUEST, (wire.WeightsJoin, wire.WeightsSession), "epoch", "rollout", "learner", "not"
)
GENERATE: Final = Stream(
    "generate",
    StreamKind.REQUEST,
    (wire.GenerateRequest, wire.AbortRequest, wire.GenerateReply),
    "server",
    "envhub",
    "rollout",
    "not",
)
RERUNS: Final = Stream(
    "reruns",
    StreamKind.REQUEST,
    (wire.Ticket, wire.EvalTicket, wire.Group, wire.Closed),
    "process",
    "operator",
    "envhub, rewardhub",
    "not",
)
METRICS: Final = Stream("metrics", StreamKind.BEST_EFFORT, (wire.Metrics,), "role.id", "all", "observers", "not")
PRESENCE: Final = Stream(
    "presence", StreamKind.BEST_EFFORT, (wire.Presence,), "role.id", "all", "those who need it", "not"
)
DEAD: Final = Stream(
    "dead", StreamKind.LOG, (wire.DeadLetter,), "stream", "all", "operator", "until purged", max_bytes=1 << 26
)
ATTEMPTS: Final = Stream(
    "attempts",
    StreamKind.KV,
    (wire.Attempt,),
    "run.stream.ticket",
    "envhub",
    "envhub",
    "a day",
    ttl_s=86_400.0,
    memory=True,
)
CONTROL: Final = Stream(
    "control", StreamKind.KV, (wire.DesiredState,), "run", "operator", "all", "last value", essential=True
)
MEMBERS: Final = Stream(
    "members", StreamKind.KV, (wire.Presence,), "run.role.id", "all", "envhub, learner", "60 s", ttl_s=60.0, memory=True
)
RUNS: Final = Stream(
    "runs", StreamKind.KV, (wire.RunSpec,), "run", "learner", "all who join", "last value", essential=True
)
RESERVE: Final = Stream(
    "reserve", StreamKind.LAST_VALUE, (), "part", "learner", "none", "until an essential message needs its room"
)

STREAMS: Final[tuple[Stream, ...]] = (
    TICKETS,
    EPISODES,
    SAMPLES,
    PARTS,
    EVALTICKETS,
    EVALS,
    WEIGHTS,
    WEIGHTSYNC,
    GENERATE,
    RERUNS,
    METRICS,
    PRESENCE,
    DEAD,
    ATTEMPTS,
    CONTROL,
    MEMBERS,
    RUNS,
    RESERVE,
)

ACK_WAIT_S: Final = 6.0  # redelivery after this long without an in-progress mark
IN_PROGRESS_EVERY_S: Final = 2.0
MAX_DELIVERIES: Final = 20  # a hub that sees a ticket for this many times closes it


def token(value: str, what: str) -> str:
    """A value that may stand between the dots of a subject.

    Raises:
        ConfigError: it holds anything but letters, digits, ``_`` and ``-``, or is longer than 64.
    """
    if not wire.NAME.fullmatch(value):
        raise ConfigError(what, value, "use 1-64 letters, digits, '_' or '-'")
    return value
