"""What each role may do on the broker, derived from the table of streams.

A role may publish what it writes and subscribe to what it reads, of one run, and ask JetStream for
nothing else. Only the learner creates, trims and purges the streams of its run; only the operator
deletes them and sees several runs.

JetStream sends its reply to any subject that the requester names, with no check of its own, and an
empty reply to a subject of JetStream's own API is a request there, even to purge or delete a
stream. Permissions alone can therefore not contain those who may ask JetStream anything: on a
server each joining role of a run has an account of its own (``broker.identity.accounts``), where
such a reply reaches only what that account imports. The learner shares the account of JetStream
with the operator and is trusted like it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from broker.contract.streams import (
    BEST_EFFORT,
    CONTROL,
    KV,
    LAST_VALUE,
    LOG,
    MEMBERS,
    METRICS,
    PRESENCE,
    REQUEST,
    ROLES,
    RUNS,
    STREAMS,
    WEIGHTS,
    WORK_QUEUE,
    Stream,
)
from broker.errors import ConfigError

LEARNER: Final = "learner"
OPERATOR: Final = "operator"
OBSERVER: Final = "observer"  # sees the figures of a run, no message of it, and changes nothing
INBOX: Final = "_INBOX"
API: Final = "$JS.API"
REPLIES: Final = "_R_"  # a server renames the reply subject of a request that crosses accounts
# the roles that join a run; the learner starts it
JOINING: Final = ("rollout", "envhub", "rewardhub")
WORK_QUEUE_READS: Final = (
    "STREAM.INFO.{}",
    "CONSUMER.INFO.{}.*",
    "CONSUMER.LIST.{}",
    "CONSUMER.MSG.NEXT.{}.*",
)
VALUE_READS: Final = ("STREAM.INFO.{}", "STREAM.MSG.GET.{}")
LOG_READS: Final = (*VALUE_READS, "DIRECT.GET.{}.>")
MANAGES: Final = (
    # to read and to delete messages
    *("STREAM.CREATE.{}", "STREAM.INFO.{}", "STREAM.PURGE.{}", "STREAM.MSG.*.{}"),
    # durable ones for hubs, others to read a log in order
    *("CONSUMER.*.{}", "CONSUMER.*.{}.*", "CONSUMER.*.*.{}.*"),
)
STORED: Final = (WORK_QUEUE, LOG, LAST_VALUE, KV)
# of the others, an observer sees the sizes
OBSERVED: Final = (METRICS, PRESENCE, MEMBERS, CONTROL, RUNS, WEIGHTS)


@dataclass(frozen=True)
class Permissions:
    """The subjects that one identity may publish to and subscribe to."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def inbox_prefix(role: str, run: str, name: str) -> str:
    """Return the subject prefix of an identity's replies, which no other identity may read.

    It stays the same when a broker makes new keys, so that connections survive that.
    """
    return ".".join([INBOX, role, run or "all", name or "local"])


def permissions(role: str, run: str, name: str = "") -> Permissions:
    """Return the permissions of one identity.

    Args:
        role: one of ``ROLES``, ``OBSERVER``, or ``OPERATOR``, which may do everything in every run.
        run: the run; ignored for the operator.
        name: of the token that brought its key to another host; empty on the broker's own host.

    Raises:
        ConfigError: if there is no such role.
    """
    if role == OPERATOR:
        return Permissions((">",), (">",))
    if role not in (*ROLES, OBSERVER):
        raise ConfigError("role", role, f"one of {', '.join(ROLES)}, {OBSERVER}, {OPERATOR}")
    publish = dict[str, None]()
    subscribe = {f"{inbox_prefix(role, run, name)}.>": None}
    for stream in STREAMS:
        publish |= dict.fromkeys(stored_requests(stream, role, run))
        if stream.writes(role) and role != OBSERVER:
            publish[own_subjects(stream, role, run)] = None
        subscribe |= dict.fromkeys(_subscribed_subjects(stream, role, run))
    if role in (LEARNER, OBSERVER):
        publish[f"{API}.INFO"] = None  # how full the store is
    # a link measures its own delay with messages to itself
    publish[f"{inbox_prefix(role, run, name)}.>"] = None
    if any(stream.kind is REQUEST and stream.reads(role) for stream in STREAMS):
        publish[f"{REPLIES}.>"] = None
    if role == LEARNER:
        # answers the operator, who has the same account
        publish[f"{inbox_prefix(OPERATOR, '', '')}.>"] = None
    return Permissions(tuple(publish), tuple(subscribe))


def stored_requests(stream: Stream, role: str, run: str) -> list[str]:
    """Return the requests to JetStream and acknowledgements that a role may send for a stream."""
    if stream.kind not in STORED:
        return []
    acknowledged = list[str]()
    requests = list[str]()
    if role == OBSERVER:
        requests += VALUE_READS if stream in OBSERVED else ["STREAM.INFO.{}"]
        requests += ["CONSUMER.LIST.{}"] if stream.kind is WORK_QUEUE else []
    elif role == LEARNER:  # it reads all, to continue where an earlier one ended
        requests += [*MANAGES, *(["DIRECT.GET.{}.>"] if stream.kind is LOG else [])]
    elif stream.reads(role):
        requests += {WORK_QUEUE: WORK_QUEUE_READS, LOG: LOG_READS}.get(stream.kind, VALUE_READS)
        acknowledged += (
            [f"$JS.ACK.{stream.stream_name(run)}.>"] if stream.kind is WORK_QUEUE else []
        )
    elif stream.writes(role):
        requests.append("STREAM.INFO.{}")
    return acknowledged + [
        f"{API}.{request.format(stream.stream_name(run))}" for request in requests
    ]


def can_hear(stream: Stream, role: str) -> bool:
    """Return whether a role subscribes to a row: to requests, to what is not kept, and to the news
    of last values.

    A subscription to what the broker stores only says that there may be a newer value, which is
    then read.
    """
    if stream.kind not in (REQUEST, BEST_EFFORT, KV, LAST_VALUE):
        return False
    if role == OBSERVER:
        return stream in OBSERVED
    if role == OPERATOR:
        return True
    # it looks for offers of a newer epoch
    return stream.reads(role) or (role == LEARNER and stream is WEIGHTS)


def _subscribed_subjects(stream: Stream, role: str, run: str) -> list[str]:
    if not can_hear(stream, role):
        return []
    if stream.kind is KV:
        return [f"{stream.key_prefix(run)}>"]
    return [own_subjects(stream, role, run) if stream.kind is REQUEST else stream.all_subjects(run)]


def own_subjects(stream: Stream, role: str, run: str) -> str:
    """Return the subjects that a role writes, or of the requests that it answers; only its own
    where keys name one.
    """
    own = {"role": role, "run": run}
    keys = [own.get(part, "*") for part in stream.key.split(".") if part]
    if stream.kind is KV:
        return stream.key_prefix(run) + ".".join(keys)
    return ".".join(["rl", run, stream.name, *keys])
