"""Creates and deletes the streams of the table on the broker."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

from broker.contract.streams import STREAMS, Stream, StreamKind
from broker.errors import UserError
from broker.jetstream.api import JetStreamConfig, call_api
from broker.nats.connection import NatsLink
from broker.nats.nats_errors import ApiError, NoStream
from broker.system.reminders import Reminders

log = logging.getLogger(__name__)

DUPLICATE_WINDOW_S: Final = 120.0
WAIT_S: Final = 0.25
STREAM_EXISTS: Final = 10058
NO_ROOM: Final = (10047, 10028)
# a broker reserves each stream's maximum
RESERVED_MIB: Final = sum(stream.max_bytes for stream in STREAMS) >> 20
TOO_FEW_SERVERS: Final = (10005, 10074)
REPLICAS_IN_CLUSTER: Final = 3
# older ones may lose a stream if a process dies: jepsen.io/analyses/nats-2.12.1
OLDEST_CLUSTER: Final = (2, 10, 23)


def require_safe_cluster(link: NatsLink) -> None:
    """Check that a cluster is new enough to keep what it has confirmed.

    Raises:
        UserError: if its servers are too old.
    """
    if link.clustered and link.server_version < OLDEST_CLUSTER:
        version, oldest = (
            ".".join(map(str, numbers)) for numbers in (link.server_version, OLDEST_CLUSTER)
        )
        raise UserError(
            f"the broker at {link.where} is a cluster of nats-server {version}, which may lose a "
            "stream when a process "
            f"dies; install {oldest} or newer there"
        )


async def ensure_stream(link: NatsLink, config: JetStreamConfig) -> None:
    """Create a stream unless it exists; an existing one keeps its settings, which an operator may
    have changed.

    Waits until there are enough servers for its replicas.

    Raises:
        UserError: if the broker has no room for it.
    """
    reminders = Reminders()
    while True:
        try:
            await call_api(link, f"STREAM.CREATE.{config['name']}", config)
        except ApiError as error:
            if error.err_code == STREAM_EXISTS:
                return
            if error.err_code in NO_ROOM:
                if await stream_exists(link, config["name"]):
                    return  # a nearly full store refuses before it checks whether the stream exists
                raise UserError(
                    f"the broker at {link.where} has no room for {config['name']}: "
                    f"{error.description}; each run "
                    f"reserves {RESERVED_MIB} MiB, so let the broker store more (broker serve "
                    "--store-max-gib, "
                    "max_file_store, the account's limit)"
                ) from None
            if error.err_code not in TOO_FEW_SERVERS:
                raise
        else:
            return
        if reminders.due(time.monotonic()):
            text = (
                "%s needs %d servers in the cluster at %s, which has fewer; waiting "
                "(broker.replicas=1 needs one)"
            )
            log.warning(text, config["name"], config["num_replicas"], link.where)
        await asyncio.sleep(0.5)


async def wait_for_stream(link: NatsLink, name: str) -> None:
    """Wait until the learner has created a stream; only it and the operator may."""
    reminders = Reminders()
    while not await stream_exists(link, name):
        if reminders.due(time.monotonic()):
            log.info("waiting for the learner to create %s", name)
        await asyncio.sleep(WAIT_S)


async def stream_exists(link: NatsLink, name: str) -> bool:
    """Return whether the broker has a stream of that name."""
    try:
        await call_api(link, f"STREAM.INFO.{name}")
    except NoStream:
        return False
    return True


async def stream_names(link: NatsLink, pattern: str) -> set[str]:
    """Return the names of the streams that take subjects of a pattern; the operator may ask for
    them.
    """
    names: set[str] = set()
    while True:
        answer = await call_api(link, "STREAM.NAMES", {"subject": pattern, "offset": len(names)})
        page = answer.get("streams") or []
        names.update(page)
        if not page or len(names) >= int(answer.get("total", 0)):
            return names


async def delete_stream(link: NatsLink, name: str) -> None:
    """Delete a stream with all its messages, if it exists."""
    try:
        await call_api(link, f"STREAM.DELETE.{name}")
    except NoStream:
        log.debug("%s did not exist", name)


def stream_config(stream: Stream, run: str, replicas: int = 1) -> JetStreamConfig | None:
    """Return JetStream's configuration of a row of the table, None if it is not stored; durations
    in nanoseconds.

    Args:
        replicas: servers that hold every message; fewer than half of them may fail.
    """
    if stream.kind in (StreamKind.REQUEST, StreamKind.BEST_EFFORT):
        return None
    name = stream.stream_name(run)
    config: JetStreamConfig = {
        "name": name,
        "subjects": [stream.all_subjects(run)],
        "storage": "memory" if stream.memory else "file",
        "retention": "limits",
        "discard": "old" if stream.max_bytes else "new",
        "max_bytes": stream.max_bytes or -1,
        "max_msgs": stream.max_messages or -1,
        "max_msg_size": stream.max_message_bytes or -1,
        "duplicate_window": int(DUPLICATE_WINDOW_S * 1e9),
        "num_replicas": replicas,
    }
    if stream.kind is StreamKind.WORK_QUEUE:
        config["retention"] = "workqueue"
    elif stream.kind is StreamKind.LOG:
        config["allow_direct"] = True  # parts are fetched one by one, from any replica
    elif stream.kind is StreamKind.LAST_VALUE:
        config |= {"max_msgs_per_subject": 1, "discard": "old"}
    elif stream.kind is StreamKind.KV:
        config |= {"subjects": [f"{stream.key_prefix(run)}>"], "max_msgs_per_subject": 1}
        config["allow_rollup_hdrs"] = True
        if ttl_s := stream.ttl_s:
            config["max_age"] = int(ttl_s * 1e9)
            config["duplicate_window"] = int(min(ttl_s, DUPLICATE_WINDOW_S) * 1e9)
    return config
