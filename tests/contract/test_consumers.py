"""Work queues whose consumer another program made with settings of its own."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from envhub_world import LAKE, World

from broker.contract.examples import EXAMPLES
from broker.contract.streams import TICKETS
from broker.contract.wire import Ticket
from broker.errors import UserError
from broker.jetstream.api import call_api
from broker.jetstream.bus import Bus
from broker.jetstream.consumers import (
    _matches_filter,
    adopt_settings,
    compare_settings,
    consumer_settings,
    ensure_consumer,
)


async def make(bus: Bus, **changes: Any) -> None:
    """The consumer of another program, with the broker's defaults except for these."""
    name = TICKETS.stream_name(bus.run)
    config = {
        "durable_name": "lake",
        "filter_subject": TICKETS.subject(bus.run, "lake"),
        "ack_policy": "explicit",
        **changes,
    }
    await call_api(
        bus.link,
        f"CONSUMER.DURABLE.CREATE.{name}.{config['durable_name']}",
        {"stream_name": name, "config": config},
    )


async def found(bus: Bus, name: str = "lake") -> dict[str, Any]:
    config: dict[str, Any] = (
        await call_api(bus.link, f"CONSUMER.INFO.{TICKETS.stream_name(bus.run)}.{name}")
    )["config"]
    return config


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, {"max_waiting": 512, "ack_wait": 30_000_000_000}),
        ({"ack_wait": 1_000_000_000}, {"ack_wait": 6_000_000_000}),
        ({"ack_wait": 700_000_000_000}, {"ack_wait": 6_000_000_000}),
        ({"max_deliver": 3, "max_ack_pending": 1}, {"max_deliver": -1, "max_ack_pending": -1}),
        (
            {"headers_only": True, "max_batch": 1, "inactive_threshold": 60_000_000_000},
            {"headers_only": None, "max_batch": None},
        ),
        ({"mem_storage": True}, {"mem_storage": True}),
        ({"durable_name": "mine"}, {"name": "mine", "max_deliver": -1}),
    ],
)
async def test_a_consumer_of_another_program_is_adopted(
    bus: Bus, changes: dict[str, Any], kept: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await make(bus, **changes)
    queue = await bus.work_queue(TICKETS, "lake")
    ticket = EXAMPLES[Ticket]
    await bus.publish(TICKETS, ticket, key="lake", ticket=417)
    (delivery,) = await queue.fetch(1, 60)
    assert delivery.message == ticket
    await delivery.ack()
    assert await bus.depth(TICKETS) == {}
    config = await found(bus, changes.get("durable_name", "lake"))
    assert {name: config.get(name) for name in kept} == kept
    assert "max_waiting 512 instead of 8192" in caplog.text
    assert await bus.last_delivered(TICKETS, "lake") == 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"deliver_subject": "elsewhere"}, "deliver_subject 'elsewhere' instead of ''"),
        ({"replay_policy": "original"}, "replay_policy 'original' instead of 'instant'"),
        ({"durable_name": "mine", "filter": "*"}, "it takes messages of other subjects"),
    ],
)
async def test_a_consumer_that_cannot_be_used_is_named_with_what_is_wrong(
    bus: Bus, changes: dict[str, Any], says: str
) -> None:
    if changes.pop("filter", None):
        changes["filter_subject"] = TICKETS.all_subjects(bus.run)
    await make(bus, **changes)
    with pytest.raises(UserError) as caught:
        await bus.work_queue(TICKETS, "lake")
    name = changes.get("durable_name", "lake")
    assert (
        f"the consumer {name} of stream {TICKETS.stream_name(bus.run)}, created by another program"
        in str(caught.value)
    )
    assert says in str(caught.value)
    assert f"nats consumer rm {TICKETS.stream_name(bus.run)} {name}" in str(caught.value)


async def test_a_hub_ends_with_one_line_where_it_cannot_use_the_consumer(
    bus: Bus, broker_url: str, tmp_path: Path
) -> None:
    world = World(bus, broker_url, tmp_path)
    await world.publish_spec({"lake": LAKE})
    await call_api(bus.link, f"CONSUMER.DELETE.{TICKETS.stream_name(bus.run)}.lake")
    await make(bus, deliver_subject="elsewhere")
    child = world.spawn("--n", "2")
    _, said = await asyncio.to_thread(child.communicate, timeout=100)
    await world.close()
    assert child.returncode == 2
    assert "Traceback" not in said
    last = said.splitlines()[-1]
    assert last.startswith(f"error: the consumer lake of stream {TICKETS.stream_name(bus.run)}")
    assert (
        "the learner could not change it; it has deliver_subject 'elsewhere' instead of ''" in last
    )


async def test_ours_is_made_once_and_not_changed(bus: Bus) -> None:
    await bus.work_queue(TICKETS, "lake")
    before = await found(bus)
    wanted = consumer_settings("lake", TICKETS.subject(bus.run, "lake"))
    assert await ensure_consumer(bus.link, TICKETS.stream_name(bus.run), wanted) == ("lake", 6.0)
    assert await found(bus) == before
    assert compare_settings(before, wanted) == {}
    assert await bus.last_delivered(TICKETS, "lake") == 0
    assert await bus.last_delivered(TICKETS, "sea") == 0


def test_what_is_kept_of_another_programs_settings() -> None:
    wanted = consumer_settings("lake", "rl.r.tickets.lake")
    theirs = {
        "durable_name": "mine",
        "ack_wait": 30_000_000_000,
        "max_waiting": 7,
        "max_deliver": 3,
        "replay_policy": "instant",
    }
    assert adopt_settings(theirs, wanted) == wanted | {
        "durable_name": "mine",
        "ack_wait": 30_000_000_000,
        "max_waiting": 7,
    }


@pytest.mark.parametrize(
    ("pattern", "takes"),
    [
        ("rl.r.tickets.lake", True),
        ("rl.r.tickets.*", True),
        ("rl.>", True),
        ("", True),
        ("rl.r.tickets.sea", False),
        ("rl.r.tickets", False),
        ("rl.r.tickets.lake.>", False),
    ],
)
def test_which_filters_take_a_subject(pattern: str, takes: bool) -> None:
    assert _matches_filter(pattern, "rl.r.tickets.lake") is takes
