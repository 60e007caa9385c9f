"""A run with nothing to learn from says so in the learner's log and in `rlearner status`."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import learner_fleet as fleet
import pytest
from test_operator import command

from broker.contract import wire
from broker.jetstream.bus import Bus
from broker.runtime.process import Stop
from broker.settings.run_settings import RunSettings
from learner.service import serve_learner

EQUAL = "in the last 5 steps all rewards of each group were equal"


async def test_equal_rewards(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def equal(ticket: wire.Ticket) -> list[wire.Message | bytes]:
        return [fleet.group(ticket, ticket.min_version, (0.0, 0.0))]

    config = fleet.config(str(tmp_path), run_name, train={"steps": 7})
    async with fleet.Hub(bus, equal), asyncio.timeout(120):
        await serve_learner(
            RunSettings.of_config(config), broker_url, Stop(), connect_deadline_s=60
        )
    said = [record for record in caplog.records if record.message.startswith(EQUAL)]
    assert [(record.levelno, record.name) for record in said] == [
        (logging.WARNING, "learner.reporting.metrics_writer")
    ]
    where = (run_name, "--dir", str(tmp_path))
    code, out, _ = await command("status", *where, "--json")
    assert code == 0
    assert json.loads(out)["warnings"] == [said[0].message]
    code, out, _ = await command("status", *where)
    assert f"  warning      {EQUAL}" in out
