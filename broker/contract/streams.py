"""The table of all streams, which the code uses, docs/wire.md shows, and a golden test freezes.

No other code may name a subject, a stream, a consumer or a bucket. A program that uses the streams
for something else declares rows of its own (docs/streams.md).
"""

from __future__ import annotations

from collections.abc import Collection
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
    REQUEST = "request/reply: not kept, retried by the requester"
    BEST_EFFORT = "best effort: plain publish, lost if nothing listens"
    KV = "key-value: last value of each key, compare-and-swap"


WORK_QUEUE, LOG, LAST_VALUE, REQUEST, BEST_EFFORT, KV = StreamKind

EVERYONE: Final = "all"
ROLES: Final = ("learner", "rollout", "envhub", "rewardhub")


def check_token(value: str, name: str) -> str:
    """Return a value after checking that it can be one part of a subject.

    Raises:
        ConfigError: if it holds anything but letters, digits, ``_`` and ``-``, or is longer than
            64.
    """
    if not wire.NAME.fullmatch(value):
        raise ConfigError(name, value, "use 1-64 letters, digits, '_' or '-'")
    return value


@dataclass(frozen=True)
class Stream:
    """One row of the table."""

    name: str  # short name, the second part of the subject
    kind: StreamKind  # how it delivers
    messages: tuple[type[wire.Message], ...]  # what it carries; empty: pieces of messages
    # meaning of the last parts of the subject, separated by dots; empty if there are none
    key: str = ""
    writer: str = EVERYONE  # roles that write, separated by commas; the operator may do everything
    reader: str = EVERYONE  # roles that read
    kept: str = "not"  # until when, in words
    ttl_s: float = 0.0  # seconds after which a key-value entry expires, 0: never
    max_bytes: int = 0  # most bytes kept, which the broker reserves, 0: unlimited
    max_messages: int = 0  # most messages kept, 0: unlimited
    max_message_bytes: int = 0  # most bytes of one, 0: what the broker allows
    # stored even if the broker is full, from the run's reserve; small and rare messages only
    essential: bool = False
    signed: bool = False  # by the owner of the run; readers ignore other values
    # kept in the broker's memory, independent of a full disk; lost when the broker restarts;
    memory: bool = False
    # bounded by number and size, since a stream's maximum of bytes would be reserved for each run

    def __post_init__(self) -> None:
        check_token(self.name, "stream")

    def subject(self, run: str, key: str = "") -> str:
        """Return the subject for one run and key, for example ``rl.demo.tickets.lake``."""
        tokens = key.split(".", self.key.count(".")) if self.key else []
        return ".".join(
            [
                "rl",
                check_token(run, "run"),
                self.name,
                *(check_token(part, self.name) for part in tokens),
            ]
        )

    def all_subjects(self, run: str, *first: str) -> str:
        """Return the subject pattern of every key, or of every key with these first parts; ignores
        empty ones.
        """
        first = tuple(filter(None, first))
        free = self.key.count(".") + 1 - len(first) if self.key else 0
        return ".".join(
            [
                "rl",
                check_token(run, "run"),
                self.name,
                *(check_token(part, self.name) for part in first),
                *["*"] * free,
            ]
        )

    def bucket(self, run: str) -> str:
        """Return the name of a KV row's bucket."""
        return f"rl_{check_token(run, 'run')}_{self.name}"

    def stream_name(self, run: str) -> str:
        """Return JetStream's name of the stream, of the one behind the bucket for KV."""
        if self.kind is StreamKind.KV:
            return f"KV_{self.bucket(run)}"
        return f"rl_{check_token(run, 'run')}_{self.name}"

    def key_prefix(self, run: str) -> str:
        """Return the part of a KV row's subjects before the key."""
        return f"$KV.{self.bucket(run)}."

    def writes(self, role: str) -> bool:
        """Return whether a role writes."""
        return role in self.writer.split(", ") or self.writer == EVERYONE

    def reads(self, role: str) -> bool:
        """Return whether a role reads."""
        return role in self.reader.split(", ") or self.reader == EVERYONE


TICKETS: Final = Stream(
    "tickets",
    WORK_QUEUE,
    (wire.Ticket,),
    key="domain",
    writer="learner",
    reader="envhub",
    kept="until acknowledged",
)
EPISODES: Final = Stream(
    "episodes",
    WORK_QUEUE,
    (wire.Group, wire.Parted),
    key="pool.ticket",
    writer="envhub, rewardhub",
    reader="rewardhub",
    kept="until acknowledged, or its ticket was closed",
)
SCORES: Final = Stream(
    "scores",
    REQUEST,
    (wire.EpisodeScoreRequest, wire.EpisodeScoreReply),
    key="pool",
    writer="envhub",
    reader="rewardhub",
)
SAMPLES: Final = Stream(
    "samples",
    LOG,
    (wire.Group, wire.Closed, wire.Parted, wire.RulesChange),
    writer="rewardhub, envhub, learner",
    reader="learner",
    kept="until every kept checkpoint covers it",
)
PARTS: Final = Stream(
    "parts",
    LOG,
    (),
    key="kind.ticket.upload.part",
    writer="envhub, rewardhub",
    reader="rewardhub, learner",
    kept="until their ticket ends",
)
EVALTICKETS: Final = Stream(
    "evaltickets",
    WORK_QUEUE,
    (wire.EvalTicket,),
    key="domain",
    writer="learner",
    reader="envhub",
    kept="until acknowledged",
)
EVALS: Final = Stream(
    "evals",
    LOG,
    (wire.Group, wire.Closed, wire.Parted),
    writer="rewardhub, envhub",
    reader="learner",
    kept="until purged",
    max_bytes=1 << 28,
)
WEIGHTS: Final = Stream(
    "weights",
    LAST_VALUE,
    (wire.WeightsOffer,),
    writer="learner",
    reader="rollout",
    kept="last value",
    essential=True,
    signed=True,
)
WEIGHTSYNC: Final = Stream(
    "weightsync",
    REQUEST,
    (wire.WeightsJoin, wire.WeightsSession),
    key="epoch",
    writer="rollout",
    reader="learner",
)
GENERATE: Final = Stream(
    "generate",
    REQUEST,
    (wire.GenerateRequest, wire.AbortRequest, wire.GenerateReply),
    key="server",
    writer="envhub",
    reader="rollout",
)
RERUNS: Final = Stream(
    "reruns",
    REQUEST,
    (wire.Ticket, wire.EvalTicket, wire.Group, wire.Closed),
    key="role.process",
    writer="operator",
    reader="envhub, rewardhub",
)
REQUESTS: Final = Stream(
    "requests",
    REQUEST,
    (wire.OperatorRequest, wire.OperatorReply),
    key="process",
    writer="operator",
    reader="learner",
)
METRICS: Final = Stream(
    "metrics", BEST_EFFORT, (wire.Metrics,), key="role.id", writer="all", reader="operator"
)
PRESENCE: Final = Stream(
    "presence", BEST_EFFORT, (wire.Presence,), key="role.id", writer="all", reader="all"
)
DEAD: Final = Stream(
    "dead",
    LOG,
    (wire.DeadLetter,),
    key="stream",
    writer="all",
    reader="operator",
    kept="until purged",
    max_bytes=1 << 26,
)
ATTEMPTS: Final = Stream(
    "attempts",
    KV,
    (wire.Attempt,),
    key="run.stream.ticket",
    writer="envhub",
    reader="envhub",
    kept="a day",
    ttl_s=86_400.0,
    memory=True,
    max_messages=50_000,
    max_message_bytes=1 << 11,
)
LENGTHS: Final = Stream(
    "lengths",
    KV,
    (wire.LengthRecord,),
    key="run.domain",
    writer="envhub",
    reader="envhub",
    kept="last value",
)
CONTROL: Final = Stream(
    "control",
    KV,
    (wire.DesiredState,),
    key="run",
    writer="operator, learner",
    reader="all",
    kept="last value",
    essential=True,
    signed=True,
)
MEMBERS: Final = Stream(
    "members",
    KV,
    (wire.Presence,),
    key="run.role.id",
    writer="all",
    reader="envhub, learner",
    kept="60 s",
    ttl_s=60.0,
    memory=True,
    max_messages=50_000,
    max_message_bytes=1 << 17,
)
RUNS: Final = Stream(
    "runs",
    KV,
    (wire.RunSpec,),
    key="run",
    writer="learner",
    reader="all",
    kept="last value",
    essential=True,
    signed=True,
)
MODELS: Final = Stream(
    "models",
    KV,
    (wire.ModelPart,),
    key="run.digest.part",
    writer="learner",
    reader="rollout, envhub",
    kept="last value",
    essential=True,
)
DEVICES: Final = Stream(
    "devices",
    KV,
    (wire.DeviceLease,),
    key="run.device",
    writer="learner, rollout",
    reader="learner, rollout",
    kept="60 s",
    ttl_s=60.0,
    memory=True,
    max_messages=10_000,
    max_message_bytes=1 << 16,
)
RESERVE: Final = Stream(
    "reserve",
    LAST_VALUE,
    (),
    key="part",
    writer="learner",
    reader="none",
    kept="until an essential message needs its room",
)

STREAMS: Final[tuple[Stream, ...]] = (
    *(
        TICKETS,
        EPISODES,
        SCORES,
        SAMPLES,
        PARTS,
        EVALTICKETS,
        EVALS,
        WEIGHTS,
        WEIGHTSYNC,
        GENERATE,
        RERUNS,
    ),
    *(
        REQUESTS,
        METRICS,
        PRESENCE,
        DEAD,
        ATTEMPTS,
        CONTROL,
        MEMBERS,
        RUNS,
        MODELS,
        DEVICES,
        LENGTHS,
        RESERVE,
    ),
)


def ticket_key(number: int, *, evaluation: bool) -> str:
    """Return the key of a ticket, unique in a run.

    The broker drops a second result published with it as message id. It ends the subjects of the
    ticket's groups.
    """
    return f"{(EVALTICKETS if evaluation else TICKETS).name}-{number}"


# redelivery after this long without an in-progress mark, with up to 180 open tickets
ACK_WAIT_S: Final = 6.0
# a dead hub's tickets are delivered again after this time at the latest
LONGEST_ACK_WAIT_S: Final = 600.0
# of all processes of a run; in a cluster the consumer's servers vote on each mark
MARKS_PER_S: Final = 90.0
MAX_DELIVERIES: Final = 20  # a hub closes a ticket on this delivery


def ack_wait_s(open_tickets: int) -> float:
    """Return the ack_wait of a run's consumers.

    JetStream takes one mark per message, none for several, so the number of open tickets decides
    how often each can be marked.
    """
    return min(max(ACK_WAIT_S, 2.0 * open_tickets / MARKS_PER_S + 2.0), LONGEST_ACK_WAIT_S)


def marking_period_s(ack_wait_s: float) -> float:
    """Return the seconds between two marks of a message: one may be lost, and the next one two
    seconds late.
    """
    return max(ack_wait_s - 2.0, ack_wait_s / 2.0) / 2.0


def require_own(streams: Collection[Stream]) -> None:
    """Check that streams of another program do not take names of the table, which mean something to
    every tool.

    Raises:
        ConfigError: if one does, or two have the same name.
    """
    names: set[str] = set()
    for stream in streams:
        if stream not in STREAMS and stream.name in {row.name for row in STREAMS}:
            raise ConfigError(
                "stream", stream.name, "another name; rlearner's own stream has this one"
            )
        if stream.name in names:
            raise ConfigError("stream", stream.name, "a name of its own for each stream")
        names.add(stream.name)
