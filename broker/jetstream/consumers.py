"""The durable consumer of a work queue: its settings, and what becomes of one that another program made with other
settings.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from broker.contract.streams import ACK_WAIT_S
from broker.errors import UserError
from broker.jetstream.api import ask
from broker.nats.connection import NatsLink
from broker.nats.nats_errors import ApiError, NoStream

log = logging.getLogger(__name__)

MAX_WAITING_PULLS: Final = 8192  # hubs that may wait at one queue
LONGEST_ACK_WAIT_S: Final = 60.0  # of another program's; as long as a dead hub's tickets lie still
KEPT: Final[tuple[str, ...]] = ("max_waiting", "mem_storage", "num_replicas")  # cannot be changed, and do no harm
# Settings of which a queue works with one value only, with the server's name for "not set".
OTHERS: Final[dict[str, Any]] = {
    "deliver_subject": "", "replay_policy": "instant", "headers_only": False, "priority_policy": "", "max_batch": 0,
    "max_expires": 0,
    "max_bytes": 0, "inactive_threshold": 0, "backoff": [], "filter_subjects": [], "mem_storage": False,
    "num_replicas": 0,
}  # fmt: skip
UNSET: Final[tuple[Any, ...]] = (None, "", 0, False, [], "none")
SECONDS: Final = ("ack_wait", "max_expires", "inactive_threshold")  # in nanoseconds on the wire


def settings(name: str, subject: str) -> dict[str, Any]:
    """JetStream's configuration of the consumer of one queue."""
    return {
        "durable_name": name,
        "filter_subject": subject,
        "ack_policy": "explicit",
        "ack_wait": int(ACK_WAIT_S * 1e9),
        "deliver_policy": "all",
        "max_ack_pending": -1,  # the default of 1,000 stalls a fleet without a word
        "max_deliver": -1,  # the hub closes a ticket that comes too often; the broker never forgets one
        "max_waiting": MAX_WAITING_PULLS,
    }


def differences(found: dict[str, Any], wanted: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings in which a consumer differs from what is wanted, with both values."""
    pairs = {name: (found.get(name), value) for name, value in (OTHERS | wanted).items()}
    return {
        name: pair for name, pair in pairs.items() if pair[0] != pair[1] and not (pair[0] in UNSET and pair[1] in UNSET)
    }


def adopted(found: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that a consumer of another program gets: the wanted ones, except those of its own that do no
    harm.
    """
    kept = {name: found[name] for name in KEPT if name in found}
    if wanted["ack_wait"] <= found.get("ack_wait", 0) <= LONGEST_ACK_WAIT_S * 1e9:
        kept["ack_wait"] = found["ack_wait"]
    return wanted | kept | {"durable_name": found["durable_name"]}


async def ensure_consumer(link: NatsLink, stream_name: str, wanted: dict[str, Any]) -> str:
    """Make the consumer of a queue, or adopt the one that is there. Return its name.

    Raises:
        UserError: the one that is there cannot be used, and why.
        ApiError: refused for another reason.
    """
    try:
        await _create(link, stream_name, wanted, action="create")
    except NoStream:
        raise
    except ApiError:
        found = await find_consumer(link, stream_name, wanted["durable_name"], wanted["filter_subject"])
        if found is None:
            raise
        return await _adopt(link, stream_name, found, wanted)
    return str(wanted["durable_name"])


async def _adopt(link: NatsLink, stream_name: str, found: dict[str, Any], wanted: dict[str, Any]) -> str:
    name, changed = found["durable_name"], adopted(found, wanted)
    try:
        if found["filter_subject"] == wanted["filter_subject"] and differences(found, changed):
            await _create(link, stream_name, changed)
        elif found["filter_subject"] != wanted["filter_subject"]:
            raise ApiError(400, 0, "it takes messages of other subjects")
    except ApiError as error:
        raise UserError(
            f"the consumer {name} of stream {stream_name}, which another program made, cannot serve "
            f"{wanted['filter_subject']}: "
            f"{error.description}; it has {_listed(differences(found, changed))}; delete it (nats consumer rm "
            f"{stream_name} {name}), "
            "and it is made as docs/wire.md says"
        ) from None
    if kept := differences(changed, wanted):
        kept.pop("durable_name", None)
        log.info("using the consumer %s of stream %s, which has %s", name, stream_name, _listed(kept) or "another name")
    return str(name)


async def find_consumer(link: NatsLink, stream_name: str, name: str, subject: str) -> dict[str, Any] | None:
    """Return the configuration of the consumer of that name, else of one that takes that subject's messages; None if
    there is none.
    """
    configs: list[dict[str, Any]] = []
    while True:
        page = await ask(link, f"CONSUMER.LIST.{stream_name}", {"offset": len(configs)})
        configs += [one["config"] for one in page.get("consumers") or []]
        if not page.get("consumers") or len(configs) >= int(page.get("total", 0)):
            break
    configs = [
        {"filter_subject": "", **one, "durable_name": one.get("durable_name") or one.get("name", "")} for one in configs
    ]
    named = [one for one in configs if one["durable_name"] == name]
    return next(iter(named + [one for one in configs if _takes(one["filter_subject"], subject)]), None)


def _takes(pattern: str, subject: str) -> bool:
    """Whether a filter takes a subject; an empty one takes all."""
    tokens, parts = (pattern or ">").split("."), subject.split(".")
    if tokens[-1] == ">" and len(parts) >= len(tokens):
        tokens, parts = tokens[:-1], parts[: len(tokens) - 1]
    return len(tokens) == len(parts) and all(token in ("*", part) for token, part in zip(tokens, parts, strict=True))


def _listed(differing: dict[str, tuple[Any, Any]]) -> str:
    return ", ".join(
        f"{name} {_shown(name, has)} instead of {_shown(name, should)}"
        for name, (has, should) in sorted(differing.items())
    )


def _shown(name: str, value: Any) -> str:
    return f"{value / 1e9:g} s" if name in SECONDS and value else repr(value)


async def _create(link: NatsLink, stream_name: str, config: dict[str, Any], **more: str) -> None:
    request = f"CONSUMER.DURABLE.CREATE.{stream_name}.{config['durable_name']}"
    await ask(link, request, {"stream_name": stream_name, "config": config, **more})
