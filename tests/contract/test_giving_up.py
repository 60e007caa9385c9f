"""A run that can only fail ends with the reason, leaves a checkpoint, and goes on when the code is
repaired.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import learner_fleet as fleet
import pytest

from broker.contract import wire
from broker.contract.streams import CONTROL
from broker.errors import UserError
from broker.jetstream.bus import Bus
from broker.runtime.announce import Announcer
from broker.runtime.process import Stop
from broker.settings.run_settings import RunSettings
from learner.checkpoints import checkpoint
from learner.service import serve_learner

WHY = "reset raised KeyError: 'x' (bad.py:7 in reset)"


def failing(ticket: wire.Ticket) -> list[wire.Message | bytes]:
    return [
        wire.Closed(
            ticket=ticket.number, domain="lake", reason="env_error", detail=WHY, by="made-up"
        )
    ]


def good(ticket: wire.Ticket) -> list[wire.Message | bytes]:
    return [fleet.group(ticket, ticket.min_version)]


async def desired(bus: Bus) -> wire.Message:
    found = await bus.key_value(CONTROL).get(bus.run)
    assert found is not None
    return found[0]


async def test_a_run_where_every_group_fails_ends_and_resumes_when_it_is_repaired(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path
) -> None:
    config = fleet.config(str(tmp_path), run_name, train={"steps": 2})
    async with fleet.Hub(bus, failing) as hub, asyncio.timeout(120):
        with pytest.raises(UserError) as caught:
            await serve_learner(
                RunSettings.of_config(config), broker_url, Stop(), connect_deadline_s=60
            )
    assert str(caught.value).startswith(
        f"all of the first 8 groups failed, most often (8 of 8) by env_error: {WHY}; fix that"
    )
    assert len(hub.tickets) <= 8 + 4
    assert await desired(bus) == wire.DesiredState(state="stopped", reason=str(caught.value))
    assert [
        checkpoint.read_checkpoint(path).step
        for path in checkpoint.list_checkpoints(tmp_path / run_name / "checkpoints")
    ] == [0]

    # seven more failures: those before do not count
    def mostly_bad(ticket: wire.Ticket) -> list[wire.Message | bytes]:
        return failing(ticket) if ticket.number <= len(hub.tickets) + 7 else good(ticket)

    async with fleet.Hub(bus, mostly_bad), asyncio.timeout(120):
        await serve_learner(
            RunSettings.of_config(config), broker_url, Stop(), connect_deadline_s=60
        )
    assert (
        checkpoint.read_checkpoint(
            checkpoint.list_checkpoints(tmp_path / run_name / "checkpoints")[-1]
        ).step
        == 2
    )


async def test_a_run_whose_only_hub_stays_broken_ends(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path
) -> None:
    config = fleet.config(str(tmp_path), run_name, failures={"give_up_after_s": 2.0})
    broken = wire.Presence(
        role="envhub",
        id="h",
        host="here",
        pid=1,
        state="failed",
        problem=f"domain lake: the last: {WHY}",
    )
    announcer = Announcer(bus, lambda: broken)
    await announcer.start()
    async with asyncio.timeout(120):
        with pytest.raises(
            UserError,
            match="for 2 s every hub of domain lake was broken and no group was trained: h: domain lake: the l",
        ):
            await serve_learner(
                RunSettings.of_config(config), broker_url, Stop(), connect_deadline_s=60
            )
    await announcer.close()
