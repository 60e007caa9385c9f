"""Settings of a work queue's durable consumer, and adoption of another program's consumer."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Final

from broker.contract.streams import ACK_WAIT_S, LONGEST_ACK_WAIT_S
from broker.errors import UserError
from broker.jetstream.api import JetStreamConfig, call_api
from broker.nats.connection import NatsLink
from broker.nats.nats_errors import ApiError, NoStream
from broker.system.reminders import Reminders

log = logging.getLogger(__name__)

MAX_WAITING_PULLS: Final = 8192  # hubs that may wait at one queue
WAIT_S: Final = 0.25
# harmless, and cannot be changed
ADOPTED_SETTINGS: Final[tuple[str, ...]] = ("max_waiting", "mem_storage", "num_replicas")
# settings for which a queue needs exactly this value
FIXED_SETTINGS: Final[JetStreamConfig] = {
    "deliver_subject": "", "replay_policy": "instant", "headers_only": False,
    "priority_policy": "", "max_batch": 0,
    "max_expires": 0, "max_bytes": 0, "inactive_threshold": 0, "backoff": [], "filter_subjects": [],
    "mem_storage": False, "num_replicas": 0,
}  # fmt: skip
UNSET: Final[tuple[Any, ...]] = (None, "", 0, False, [], "none")
SECONDS: Final = ("ack_wait", "max_expires", "inactive_threshold")  # in nanoseconds on the wire


def consumer_settings(name: str, subject: str, ack_wait_s: float = ACK_WAIT_S) -> JetStreamConfig:
    """Return JetStream's configuration of one queue's consumer."""
    return {
        "durable_name": name,
        "filter_subject": subject,
        "ack_policy": "explicit",
        "ack_wait": int(ack_wait_s * 1e9),
        "deliver_policy": "all",
        "max_ack_pending": -1,  # the default of 1,000 silently stalls a fleet
        # hubs close a ticket that is delivered too often; the broker must not drop it
        "max_deliver": -1,
        "max_waiting": MAX_WAITING_PULLS,
    }


def compare_settings(
    existing: JetStreamConfig, required: JetStreamConfig
) -> dict[str, tuple[Any, Any]]:
    """Return the settings in which a consumer differs from what is wanted, with both values."""
    pairs = {
        name: (existing.get(name), value) for name, value in (FIXED_SETTINGS | required).items()
    }
    return {
        name: (a, b) for name, (a, b) in pairs.items() if a != b and not (a in UNSET and b in UNSET)
    }


def adopt_settings(existing: JetStreamConfig, required: JetStreamConfig) -> JetStreamConfig:
    """Return the settings for another program's consumer: the wanted ones, except harmless ones of
    its own.
    """
    overrides = {name: existing[name] for name in ADOPTED_SETTINGS if name in existing}
    if required["ack_wait"] <= existing.get("ack_wait", 0) <= LONGEST_ACK_WAIT_S * 1e9:
        overrides["ack_wait"] = existing["ack_wait"]
    return required | overrides | {"durable_name": existing["durable_name"]}


async def ensure_consumer(
    link: NatsLink, stream_name: str, required: JetStreamConfig
) -> tuple[str, float]:
    """Create the consumer of a queue, or adopt the existing one; return its name and its ack_wait
    in seconds.

    A process that may not create it waits until the learner has; the learner changes what it can,
    but keeps a longer ack_wait: hubs mark what they hold as often as the one they know requires.

    Raises:
        UserError: if the existing one cannot be used.
        ApiError: if the broker refuses for another reason.
    """
    if not link.login.manages:
        return await _wait_for_consumer(link, stream_name, required)
    try:
        await _create_consumer(link, stream_name, required, action="create")
    except NoStream:
        raise
    except ApiError:
        existing = await find_consumer(
            link, stream_name, required["durable_name"], required["filter_subject"]
        )
        if existing is None:
            raise
        return await _adopt_consumer(link, stream_name, existing, required)
    return _name_and_wait(required)


async def _wait_for_consumer(
    link: NatsLink, stream_name: str, required: JetStreamConfig
) -> tuple[str, float]:
    reminders = Reminders()
    while (
        existing := await find_consumer(
            link, stream_name, required["durable_name"], required["filter_subject"]
        )
    ) is None:
        if reminders.due(time.monotonic()):
            log.info(
                "waiting for the learner to create the consumer of %s", required["filter_subject"]
            )
        await asyncio.sleep(WAIT_S)
    if existing["filter_subject"] != required["filter_subject"] or compare_settings(
        existing, adopt_settings(existing, required)
    ):
        raise _unusable_consumer(stream_name, existing, required, "the learner could not change it")
    return _name_and_wait(existing)


async def _adopt_consumer(
    link: NatsLink, stream_name: str, existing: JetStreamConfig, required: JetStreamConfig
) -> tuple[str, float]:
    name = existing["durable_name"]
    config = adopt_settings(existing, required)
    try:
        if existing["filter_subject"] == required["filter_subject"] and compare_settings(
            existing, config
        ):
            await _create_consumer(link, stream_name, config)
        elif existing["filter_subject"] != required["filter_subject"]:
            raise ApiError(400, 0, "it takes messages of other subjects")
    except ApiError as error:
        raise _unusable_consumer(stream_name, existing, required, error.description) from None
    if deviations := compare_settings(config, required):
        deviations.pop("durable_name", None)
        log.info(
            "using the consumer %s of stream %s, which has %s",
            name,
            stream_name,
            _describe_differences(deviations) or "another name",
        )
    return _name_and_wait(config)


def _name_and_wait(config: JetStreamConfig) -> tuple[str, float]:
    return str(config["durable_name"]), config["ack_wait"] / 1e9


def _unusable_consumer(
    stream_name: str, existing: JetStreamConfig, required: JetStreamConfig, reason: str
) -> UserError:
    name = existing["durable_name"]
    return UserError(
        f"the consumer {name} of stream {stream_name}, created by another program, cannot serve "
        f"{required['filter_subject']}: {reason}; it has "
        f"{_describe_differences(compare_settings(existing, adopt_settings(existing, required)))}; "
        f"delete it with `nats consumer rm {stream_name} {name}` to have it created as in "
        "docs/wire.md"
    )


async def find_consumer(
    link: NatsLink, stream_name: str, name: str, subject: str
) -> JetStreamConfig | None:
    """Return the configuration of the consumer with that name, else of one that takes that subject,
    else None.
    """
    configs: list[JetStreamConfig] = []
    while True:
        page = await call_api(link, f"CONSUMER.LIST.{stream_name}", {"offset": len(configs)})
        configs += [config["config"] for config in page.get("consumers") or []]
        if not page.get("consumers") or len(configs) >= int(page.get("total", 0)):
            break
    for config in configs:
        config.setdefault("filter_subject", "")
        config["durable_name"] = config.get("durable_name") or config.get("name", "")
    matches = [config for config in configs if config["durable_name"] == name]
    return next(
        iter(
            matches
            + [config for config in configs if _matches_filter(config["filter_subject"], subject)]
        ),
        None,
    )


def _matches_filter(pattern: str, subject: str) -> bool:
    """Return whether a filter matches a subject; an empty one matches all."""
    tokens = (pattern or ">").split(".")
    parts = subject.split(".")
    if tokens[-1] == ">" and len(parts) >= len(tokens):
        tokens, parts = tokens[:-1], parts[: len(tokens) - 1]
    return len(tokens) == len(parts) and all(
        token in ("*", part) for token, part in zip(tokens, parts, strict=True)
    )


def _describe_differences(differing: dict[str, tuple[Any, Any]]) -> str:
    items = sorted(differing.items())
    return ", ".join(
        f"{name} {_format_setting(name, value)} instead of {_format_setting(name, required)}"
        for name, (value, required) in items
    )


def _format_setting(name: str, value: Any) -> str:
    return f"{value / 1e9:g} s" if name in SECONDS and value else repr(value)


async def _create_consumer(
    link: NatsLink, stream_name: str, config: JetStreamConfig, **more: str
) -> None:
    request = f"CONSUMER.DURABLE.CREATE.{stream_name}.{config['durable_name']}"
    await call_api(link, request, {"stream_name": stream_name, "config": config, **more})
