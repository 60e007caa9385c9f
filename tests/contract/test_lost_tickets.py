"""Tickets that a hub acknowledges and forgets, on a real broker and under a real learner."""

from __future__ import annotations

import asyncio
from pathlib import Path

import learner_fleet as fleet
import msgspec
import pytest
from waits import until

from broker.contract import wire
from broker.contract.streams import EPISODES, SAMPLES, TICKETS
from broker.jetstream.bus import Bus
from broker.runtime.process import Stop
from broker.settings.run_settings import RunSettings
from learner.credit import ledger_file, ledger_segments, orphans
from learner.credit.ledger import IssueTicket, Ledger, TicketEnd
from learner.credit.orphans import OrphanReaper
from learner.credit.ticket_rules import DomainRule, TicketRules
from learner.credit.tickets import TicketIssuer
from learner.service import serve_learner


async def test_what_is_gone_from_a_queue(bus: Bus) -> None:
    tickets = [
        action.ticket for action in a_ledger().open_credit() if isinstance(action, IssueTicket)
    ]
    assert await bus.missing(TICKETS, {1, 2}) == set()
    for ticket in tickets:
        await bus.publish(TICKETS, ticket, key="lake", ticket=ticket.number)
    numbers = {1, 2, 3, 4, 9}
    assert await bus.missing(TICKETS, numbers) == set()
    await bus.delete(TICKETS, 2)
    await bus.delete(TICKETS, 4)
    assert await bus.missing(TICKETS, numbers) == {2, 4}
    await bus.delete(TICKETS, 1)
    assert await bus.missing(TICKETS, numbers) == {1, 2, 4}
    await bus.delete(TICKETS, 3)
    assert await bus.missing(TICKETS, numbers) == {1, 2, 3, 4}
    assert await bus.bounds(TICKETS) == (5, 4)


def a_ledger() -> Ledger:
    return Ledger(TicketRules(9, 4, 0, "wait", 0, (DomainRule("lake", 1.0, 2, 2, 9.0),)))


async def test_only_what_is_in_no_stream_is_closed(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One ticket is in its queue, one being scored, one in the part of the log that was not read
    yet, one lost.
    """
    monkeypatch.setattr(orphans, "GRACE_S", 0.2)
    monkeypatch.setattr(orphans, "LOOK_EVERY_S", 0.1)
    ledger = a_ledger()
    tickets = [action.ticket for action in ledger.open_credit() if isinstance(action, IssueTicket)]
    for ticket in tickets:
        await bus.publish(TICKETS, ticket, key="lake", ticket=ticket.number)
    group = fleet.group(tickets[1], 0)
    scored = await bus.publish(EPISODES, group, key="default", ticket=2)
    await bus.publish(SAMPLES, fleet.group(tickets[2], 0), ticket=3)
    for number in (2, 3, 4):
        await bus.delete(TICKETS, number)  # as an acknowledgement does
    watching = asyncio.create_task(OrphanReaper(bus, ledger, 1).serve())
    await asyncio.sleep(1.0)
    assert await bus.last_seq(SAMPLES) == 1, (
        "closed a ticket although its group may be in a reward queue"
    )
    ledger.apply(TicketEnd(3, "late"), 1)
    await bus.publish(SAMPLES, group, ticket=2)
    assert scored is not None
    await bus.delete(EPISODES, scored)
    await asyncio.sleep(1.0)
    assert await bus.last_seq(SAMPLES) == 2, (
        "closed a ticket although its record may not have been read"
    )
    ledger.apply(TicketEnd(2, "late"), 2)
    await until(lambda: _holds(bus, 3))
    await asyncio.sleep(0.5)
    watching.cancel()
    assert await bus.last_seq(SAMPLES) == 3
    async for entry in bus.read_log(SAMPLES, 3):
        assert entry.message == wire.Closed(
            ticket=4, domain="lake", reason="timeout", detail=orphans.DETAIL, by=bus.name
        )
        break


async def test_groups_of_a_closed_ticket_leave_the_reward_queues(bus: Bus) -> None:
    tickets = [
        action.ticket for action in a_ledger().open_credit() if isinstance(action, IssueTicket)
    ]
    for pool, ticket in (("default", tickets[0]), ("default", tickets[1]), ("judge", tickets[0])):
        await bus.publish(EPISODES, fleet.group(ticket, 0), key=pool, ticket=ticket.number)
    evaluated = msgspec.structs.replace(fleet.group(tickets[0], 0), eval_step=3)
    await bus.publish(EPISODES, evaluated, key="default", ticket=1)
    assert await bus.depth(EPISODES) == {"default": 3, "judge": 1}
    issuer = TicketIssuer(bus, TICKETS)
    serving = asyncio.create_task(issuer.serve())
    issuer.withdraw(1)
    await until(lambda: _has(bus, {"default": 2}))
    await bus.remove_groups(1, evaluation=True)
    assert await bus.depth(EPISODES) == {"default": 1}
    (kept,) = await (await bus.work_queue(EPISODES, "default")).fetch(3, 5.0)
    assert kept.ticket == 2
    serving.cancel()


async def _has(bus: Bus, depths: dict[str, int]) -> bool:
    return await bus.depth(EPISODES) == depths


async def _holds(bus: Bus, last: int) -> bool:
    return await bus.last_seq(SAMPLES) >= last


async def test_a_learner_replaces_a_ticket_that_was_acknowledged_without_a_record(
    bus: Bus,
    broker_url: str,
    run_name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(orphans, "GRACE_S", 0.5)
    monkeypatch.setattr(orphans, "LOOK_EVERY_S", 0.2)

    def answer(ticket: wire.Ticket) -> list[wire.Message | bytes]:
        return [] if ticket.number == 2 else [fleet.group(ticket, ticket.min_version)]

    config = fleet.config(str(tmp_path), run_name, train={"steps": 1, "ticket_timeout_s": 1800.0})
    async with fleet.Hub(bus, answer) as hub, asyncio.timeout(240):
        await serve_learner(
            RunSettings.of_config(config), broker_url, Stop(), connect_deadline_s=60
        )
    assert [(ticket.number, ticket.task_index) for ticket in hub.tickets] == [
        (1, 0),
        (2, 1),
        (3, 2),
    ]
    _, dead = ledger_file.final_counts(
        ledger_segments.read_newest(tmp_path / run_name / ledger_segments.FOLDER)[0]
    )
    assert dead == {"timeout": 1}
    assert (
        f"ticket 2 (lake) closed by learner: timeout, the 1. so far: {orphans.DETAIL}"
        in caplog.text
    )
