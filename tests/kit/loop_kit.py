"""The learner's loop with a real broker and ledger, and nothing that trains: what it reads, counts
and deletes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import AsyncMock, MagicMock

import msgspec
from large_groups import group

from broker.contract import wire
from broker.jetstream.bus import Bus
from broker.runtime.process import Stop
from learner.credit.ledger import Ledger
from learner.credit.recovery import RecoveryResult
from learner.credit.ticket_rules import DomainRule, TicketRules
from learner.loop import TrainingLoop

# one episode in a group
RULES = TicketRules(10, 2, 1, "drop", 0, (DomainRule("lake", 1.0, 1, 1, 600.0),))


def opened_ledger(**changes: object) -> Ledger:
    """A ledger whose credit is open."""
    ledger = Ledger(replace(RULES, **changes))  # type: ignore[arg-type]
    ledger.open_credit()
    return ledger


def scored_group(ticket: wire.Ticket, size: int) -> wire.Group:
    """A group of ``size`` bytes that the learner takes."""
    made = group(
        ticket.number,
        size,
        domain=ticket.domain,
        task_index=ticket.task_index,
        min_version=0,
        pools=[],
    )
    (sampled,) = made.trajectories
    runs = wire.column([0, len(sampled.loss_mask.array())], "<i4")
    return msgspec.structs.replace(
        made, trajectories=[msgspec.structs.replace(sampled, episode=0, version_runs=runs)]
    )


@asynccontextmanager
async def running_loop(bus: Bus, ledger: Ledger) -> AsyncIterator[asyncio.Task[bool]]:
    """The loop of a learner that has this ledger; it ends without a word, as if killed."""
    training = MagicMock(
        on_device=False,
        call=AsyncMock(return_value=0.0),
        has_room=AsyncMock(),
        failed=asyncio.Future(),
    )
    training.backend.vocab_size = 1 << 30
    training.spans.traces = None
    records = SimpleNamespace(began=AsyncMock(), consumed=AsyncMock(), completed=AsyncMock())
    giveup = MagicMock()
    giveup.failed.return_value = ""
    evaluator = MagicMock()
    evaluator.is_measuring.return_value = False
    loop = TrainingLoop(
        bus, ledger, training, issuer=MagicMock(), evaluator=evaluator, metrics_writer=MagicMock(),
        records=records, stop=Stop(),  # type: ignore[arg-type]
        resumed=RecoveryResult(), offer=lambda _: 0.0, fleet_values=dict, checkpoint=AsyncMock(), checkpoint_every=0,
        requested=asyncio.Event(), between_steps=AsyncMock(), failure_monitor=giveup, steps=ledger.rules.steps,
    )  # fmt: skip
    task = asyncio.create_task(loop.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
