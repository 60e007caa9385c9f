"""What each role may do on the broker, derived from the table of streams.

A role may publish what it writes and subscribe to what it reads, of one run, and ask JetStream for nothing else. Only
the learner creates, trims and purges the streams of its run; only the operator deletes them and sees several runs.

JetStream sends its reply to any subject that the requester names, with no check of its own. The last values on which
processes act are therefore signed (``broker.identity.signatures``), so that a reply cannot replace one. An empty reply
(no message, or an empty one) to a subject of JetStream's own API is a request there, even to purge or delete a stream.
An observer may therefore ask only what has a reply in JSON, which those requests refuse.
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
WORK_QUEUE_READS: Final = ("STREAM.INFO.{}", "CONSUMER.INFO.{}.*", "CONSUMER.LIST.{}", "CONSUMER.MSG.NEXT.{}.*")
LOG_READS: Final = (
    *("STREAM.INFO.{}", "STREAM.MSG.GET.{}", "DIRECT.GET.{}.>"),
    *("CONSUMER.CREATE.{}", "CONSUMER.MSG.NEXT.{}.*", "CONSUMER.DELETE.{}.*"),
)
OBSERVER_READS: Final = ("STREAM.INFO.{}", "STREAM.MSG.GET.{}")
MANAGES: Final = (
    *("STREAM.CREATE.{}", "STREAM.INFO.{}", "STREAM.PURGE.{}", "STREAM.MSG.GET.{}", "STREAM.MSG.DELETE.{}"),
    *("CONSUMER.DURABLE.CREATE.{}.*", "CONSUMER.INFO.{}.*", "CONSUMER.LIST.{}"),
)
STORED: Final = (WORK_QUEUE, LOG, LAST_VALUE, KV)
OBSERVED: Final = (METRICS, PRESENCE, MEMBERS, CONTROL, RUNS, WEIGHTS)  # of the others, an observer sees the sizes


@dataclass(frozen=True)
class Permissions:
    """The subjects that one identity may publish to and subscribe to.

    Attributes:
        replies: whether it may reply to requests that it receives.
    """

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    replies: bool = False


def inbox(role: str, run: str, name: str) -> str:
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
        return Permissions((">",), (">",), replies=True)
    if role not in (*ROLES, OBSERVER):
        raise ConfigError("role", role, f"one of {', '.join(ROLES)}, {OBSERVER}, {OPERATOR}")
    publish, subscribe = dict[str, None](), {f"{inbox(role, run, name)}.>": None}
    for stream in STREAMS:
        publish |= dict.fromkeys(_publishes(stream, role, run))
        subscribe |= dict.fromkeys(_subscribes(stream, role, run))
    if role in (LEARNER, OBSERVER):
        publish[f"{API}.INFO"] = None  # how full the store is
    publish[f"{inbox(role, run, name)}.>"] = None  # a link measures its own delay with messages to itself
    replies = any(stream.kind is REQUEST and stream.reads(role) for stream in STREAMS)
    return Permissions(tuple(publish), tuple(subscribe), replies)


def _publishes(stream: Stream, role: str, run: str) -> list[str]:
    allowed, requests = list[str](), list[str]()
    if role == OBSERVER:
        requests += ["STREAM.INFO.{}"] if stream.kind in STORED else []
        requests += ["CONSUMER.LIST.{}"] if stream.kind is WORK_QUEUE else []
        requests += OBSERVER_READS if stream in OBSERVED else []
        return [f"{API}.{one.format(stream.stream_name(run))}" for one in requests]
    if stream.writes(role):
        allowed.append(_written(stream, role, run))
        requests += ["STREAM.INFO.{}"] if stream.kind in STORED else []
    if stream.reads(role) and stream.kind is WORK_QUEUE:
        requests += WORK_QUEUE_READS
        allowed.append(f"$JS.ACK.{stream.stream_name(run)}.>")
    elif (stream.reads(role) or role == LEARNER) and stream.kind in (LOG, LAST_VALUE, KV):
        requests += LOG_READS  # the learner reads all, to continue where an earlier one ended
    if role == LEARNER and stream.kind in STORED:
        requests += MANAGES
    return allowed + [f"{API}.{one.format(stream.stream_name(run))}" for one in requests]


def _subscribes(stream: Stream, role: str, run: str) -> list[str]:
    if stream not in OBSERVED if role == OBSERVER else not stream.reads(role):
        return []
    if stream.kind is KV:
        return [f"{stream.key_prefix(run)}>"]
    return [stream.all_subjects(run)] if stream.kind in (REQUEST, BEST_EFFORT) else []


def _written(stream: Stream, role: str, run: str) -> str:
    """Return the subjects that a role writes; where keys name the role, only its own."""
    own = {"role": role, "run": run}
    keys = [own.get(part, "*") for part in stream.key.split(".") if part]
    if stream.kind is KV:
        return stream.key_prefix(run) + ".".join(keys)
    return ".".join(["rl", run, stream.name, *keys])
