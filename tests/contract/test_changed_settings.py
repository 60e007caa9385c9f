"""A run that is started again with other settings, and tickets that wait: real learners on a real
broker.
"""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import learner_fleet as fleet
import pytest
from waits import until

from broker.contract import wire
from broker.contract.streams import SAMPLES, TICKETS, Stream
from broker.jetstream.bus import Bus
from broker.runtime.announce import Announcer
from broker.runtime.process import Stop
from broker.settings.run_settings import RunSettings
from learner.credit import ledger_segments
from learner.service import serve_learner

LAKE = {
    "env": "frozenlake",
    "group_size": 2,
    "max_turns": 4,
    "max_context_tokens": 64,
    "deadline_s": 20,
    "sampling": {"max_tokens": 4},
}


def lines(config: dict[str, Any]) -> list[dict[str, Any]]:
    path = Path(config["run"]["dir"]) / config["run"]["name"] / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def tickets_of(line: dict[str, Any]) -> tuple[int, ...]:
    numbers = tuple(
        line[f"ticket/{name}"]
        for name in ("issued", "trained", "filtered", "dropped", "dead", "open")
    )
    assert numbers[0] == sum(numbers[1:])
    return numbers


def good(ticket: wire.Ticket) -> list[wire.Message | bytes]:
    return [fleet.group(ticket, ticket.min_version)]


async def life(
    bus: Bus, url: str, config: dict[str, Any], stop: Stop | None = None, **hub: Any
) -> list[wire.Ticket]:
    """One life of the learner with a made-up hub; the tickets that the hub was given."""
    async with fleet.Hub(bus, **{"answer": good, **hub}) as made, asyncio.timeout(120):
        await serve_learner(
            RunSettings.of_config(config), url, stop or Stop(), connect_deadline_s=60
        )
    return made.tickets


async def test_a_domain_that_is_renamed(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path
) -> None:
    """Tickets of the old name are dropped and withdrawn, and the new name takes their share."""
    stop = Stop()

    def answer(ticket: wire.Ticket) -> list[wire.Message | bytes]:
        if ticket.number > 4:
            stop.request("test")
        return good(ticket)

    train = {"steps": 4, "max_staleness": 1}
    config = fleet.config(str(tmp_path), run_name, train=train, domains={"maze": LAKE})
    await bus.ensure_streams()
    await life(bus, broker_url, config, stop, answer=answer)  # nobody plays the maze
    assert (await bus.depth(TICKETS))["maze"] >= 2
    config = fleet.config(str(tmp_path), run_name, train=train, domains={"mine": LAKE})
    played = await life(bus, broker_url, config, domains=("lake", "mine"))
    assert {ticket.domain for ticket in played} == {"lake", "mine"}
    assert "maze" not in await bus.depth(TICKETS)
    last = lines(config)[-1]
    issued, trained, filtered, dropped, dead, still_open = tickets_of(last)
    assert (last["step"], trained, filtered, dead, still_open) == (4, 8, 0, 0, 0)
    assert dropped == last["ticket/closed_removed"] >= 2
    assert issued == 8 + dropped


async def test_settings_apply_from_the_end_of_the_log_on(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path
) -> None:
    """A learner that dies without a checkpoint: what had arrived by then is trained by the rules of
    then.
    """
    config = fleet.config(
        str(tmp_path),
        run_name,
        train={"steps": 4, "max_staleness": 1},
        checkpoint={"every_steps": 100},
    )
    await bus.ensure_streams()
    path, queue = tmp_path / run_name / "metrics.jsonl", await bus.work_queue(TICKETS, "lake")
    async with asyncio.timeout(120):
        first = asyncio.create_task(
            serve_learner(RunSettings.of_config(config), broker_url, Stop(), connect_deadline_s=60)
        )
        for _ in range(4):
            (delivery,) = await queue.fetch(1, 60.0)
            assert isinstance(delivery.message, wire.Ticket)
            await bus.publish(SAMPLES, fleet.group(delivery.message, 0), ticket=delivery.ticket)
            await delivery.ack()
        await until(lambda: path.exists() and len(lines(config)) >= 2)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
    strict = fleet.config(
        str(tmp_path),
        run_name,
        train={"steps": 4, "max_staleness": 0},
        checkpoint={"every_steps": 100},
    )
    async with asyncio.timeout(120):
        second = asyncio.create_task(
            serve_learner(RunSettings.of_config(strict), broker_url, Stop(), connect_deadline_s=60)
        )
        async for entry in bus.read_log(SAMPLES, 6):  # behind the first rules and four groups
            assert isinstance(entry.message, wire.RulesChange)
            break
        async with fleet.Hub(bus, good):
            await second
    found = lines(strict)
    assert [line["step"] for line in found] == [1, 2, 3, 4]
    # step 2 used groups of version 0, as it did before
    assert [line["staleness/max"] for line in found] == [0.0, 1.0, 0.0, 0.0]
    issued, trained, _, dropped, dead, still_open = tickets_of(found[-1])
    assert (trained, dead, still_open) == (8, 0, 0)
    # Of tickets 5-8 two are withdrawn, and 5 and 6, which ask for version 1 or newer, come with
    # tokens too old for version 2.
    assert (issued, dropped, found[-1]["ticket/closed_withdrawn"]) == (12, 4, 2)


async def test_log_decides_how_many_groups_are_trained_on(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path
) -> None:
    """A learner that dies without a checkpoint: its first step is trained again on the same groups
    as before.
    """

    def settings(algorithm: dict[str, Any]) -> dict[str, Any]:
        train = {"groups_per_step": 4, "steps": 3}
        every = {"every_steps": 100}
        return fleet.config(
            str(tmp_path), run_name, train=train, algorithm=algorithm, checkpoint=every
        )

    def varied(ticket: wire.Ticket) -> list[wire.Message | bytes]:
        return [fleet.group(ticket, ticket.min_version, (0.0, float(ticket.number % 4)))]

    config = settings({"pg_variant": "starpo_s", "keep_fraction": 0.5})
    await bus.ensure_streams()
    path, queue = tmp_path / run_name / "metrics.jsonl", await bus.work_queue(TICKETS, "lake")
    async with asyncio.timeout(120):
        first = asyncio.create_task(
            serve_learner(RunSettings.of_config(config), broker_url, Stop(), connect_deadline_s=60)
        )
        for _ in range(4):
            (delivery,) = await queue.fetch(1, 60.0)
            assert isinstance(delivery.message, wire.Ticket)
            (group,) = varied(delivery.message)
            assert isinstance(group, wire.Group)
            await bus.publish(SAMPLES, group, ticket=delivery.ticket)
            await delivery.ack()
        await until(lambda: path.exists() and len(lines(config)) >= 1)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
    (before,) = lines(config)
    folder = tmp_path / run_name / ledger_segments.FOLDER
    trained = {one.ticket for one in ledger_segments.LedgerLines(folder) if one.state == "trained"}
    assert (before["actor/num_rows"], len(trained)) == (4.0, 2)
    changed = settings({"pg_variant": "ppo"})
    async with asyncio.timeout(120):
        second = asyncio.create_task(
            serve_learner(RunSettings.of_config(changed), broker_url, Stop(), connect_deadline_s=60)
        )
        async for entry in bus.read_log(SAMPLES, 6):  # behind the first rules and four groups
            assert isinstance(entry.message, wire.RulesChange)
            break
        async with fleet.Hub(bus, varied):
            await second
    found = lines(changed)
    assert [line["actor/num_rows"] for line in found] == [4.0, 8.0, 8.0]
    again = {
        one.ticket
        for one in ledger_segments.LedgerLines(folder)
        if one.state == "trained" and one.step == 1
    }
    assert again == trained
    _, num_trained, filtered, *_, still_open = tickets_of(found[-1])
    assert (num_trained, filtered, still_open) == (10, 2, 0)


async def test_fewer_steps_end_the_run_even_if_the_log_holds_groups_for_more(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path
) -> None:
    """Groups of the old settings precede the record of the new ones in the log."""
    config = fleet.config(
        str(tmp_path), run_name, train={"steps": 4}, checkpoint={"every_steps": 100}
    )
    path = tmp_path / run_name / "metrics.jsonl"
    async with asyncio.timeout(120), fleet.Hub(bus, good):
        first = asyncio.create_task(
            serve_learner(RunSettings.of_config(config), broker_url, Stop(), connect_deadline_s=60)
        )
        await until(lambda: path.exists() and len(lines(config)) >= 2)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
    await life(bus, broker_url, fleet.config(str(tmp_path), run_name, train={"steps": 1}))
    assert [line["step"] for line in lines(config)] == [1]
    await life(bus, broker_url, fleet.config(str(tmp_path), run_name, train={"steps": 4}))
    found = lines(config)
    assert [line["step"] for line in found] == [1, 2, 3, 4]
    assert tickets_of(found[-1])[1] == 8


async def test_a_checkpoint_that_is_ahead_of_the_tickets_stream(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop while most tickets are still to be published: the next life publishes them, under the
    same numbers.
    """
    config = fleet.config(
        str(tmp_path), run_name, train={"steps": 2, "groups_per_step": 20, "max_staleness": 1}
    )
    stop, publish = Stop(), Bus.publish

    async def slow(self: Bus, stream: Stream, message: wire.Message, **more: Any) -> int | None:
        if isinstance(message, wire.Ticket) and message.number > 5:
            stop.request("test")
            await asyncio.Event().wait()
        return await publish(self, stream, message, **more)

    await bus.ensure_streams()
    with monkeypatch.context() as patched:
        patched.setattr(Bus, "publish", slow)
        async with asyncio.timeout(120):
            await serve_learner(
                RunSettings.of_config(config), broker_url, stop, connect_deadline_s=60
            )
    assert await bus.last_seq(TICKETS) == 5
    played = await life(bus, broker_url, config)
    assert sorted(ticket.number for ticket in played) == list(range(1, 41))
    assert [ticket.task_index for ticket in sorted(played, key=lambda one: one.number)] == list(
        range(40)
    )
    assert tickets_of(lines(config)[-1]) == (40, 40, 0, 0, 0, 0)


async def test_a_ticket_that_waits_in_its_queue_does_not_age(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path
) -> None:
    """Eight tickets wait for a hub that takes one after the other, up to three times as long as a
    ticket may take.
    """
    timing = {"ticket_timeout_s": 3.0, "steps": 2, "groups_per_step": 4, "max_staleness": 1}
    config = fleet.config(
        str(tmp_path), run_name, train=timing, domains={"lake": {**LAKE, "deadline_s": 2.0}}
    )
    await bus.ensure_streams()
    here = wire.Presence(
        role="envhub",
        id="hub",
        host=socket.gethostname(),
        pid=1,
        state="serving",
        slots=1,
        serves=["lake"],
    )
    announcer = Announcer(bus, lambda: here)
    await announcer.start()
    played = await life(bus, broker_url, config, work_s=1.2)
    await announcer.close()
    assert len(played) == 8
    assert tickets_of(lines(config)[-1]) == (8, 8, 0, 0, 0, 0)


async def test_a_ticket_that_its_hub_forgot_is_closed_and_withdrawn(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path
) -> None:
    timing = {"ticket_timeout_s": 3.0, "steps": 1, "groups_per_step": 2, "max_staleness": 0}
    config = fleet.config(
        str(tmp_path), run_name, train=timing, domains={"lake": {**LAKE, "deadline_s": 2.0}}
    )
    await bus.ensure_streams()
    here = wire.Presence(
        role="envhub",
        id="hub",
        host=socket.gethostname(),
        pid=1,
        state="serving",
        slots=1,
        serves=["lake"],
    )
    announcer, queue = Announcer(bus, lambda: here), await bus.work_queue(TICKETS, "lake")
    await announcer.start()
    async with asyncio.timeout(120):
        learner = asyncio.create_task(
            serve_learner(RunSettings.of_config(config), broker_url, Stop(), connect_deadline_s=60)
        )
        (held,) = await queue.fetch(1, 60.0)  # never acknowledged, never ended
        hub = fleet.Hub(bus, good)
        async with hub:
            await learner
    await announcer.close()
    assert held.seq == 1
    assert [ticket.number for ticket in hub.tickets] == [2, 3]
    assert tickets_of(lines(config)[-1]) == (3, 2, 0, 0, 1, 0)
    assert lines(config)[-1]["ticket/closed_timeout"] == 1
    assert await bus.depth(TICKETS) == {}
    closed = [
        line
        for line in ledger_segments.LedgerLines(tmp_path / run_name / ledger_segments.FOLDER)
        if line.state == "dead"
    ]
    assert [(line.ticket, line.reason) for line in closed] == [(1, "timeout")]
