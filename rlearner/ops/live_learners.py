"""Asks a broker whether a run has a live learner."""

from __future__ import annotations

import asyncio
import os

from broker.contract import wire
from broker.errors import BrokerUnreachable
from broker.jetstream.bus import Bus
from broker.nats import addresses
from broker.runtime.presence import census
from broker.settings.runspec import find_runs
from learner.run_folder import DEADLINE_S
from rlearner.doctor.broker_checks import read_server_info


async def ask_broker(url: str, run: str) -> tuple[list[wire.Presence], str]:
    """Return the run's live learners, and the broker's problem (``, which does not answer``), if any."""
    answers = [await asyncio.to_thread(read_server_info, server) for server in addresses.split(url)]
    if not any(info for info, _ in answers):
        return [], f", which does not answer ({answers[0][1]})"
    try:
        bus = await Bus.connect(url, run, name=f"operator-{os.getpid()}", deadline_s=DEADLINE_S)
    except BrokerUnreachable as error:
        return [], f", where {error}"
    try:
        problem = "" if run in await find_runs(bus) else ", which no longer knows the run"
        return [one for one in await census(bus, run) if one.role == "learner"], problem
    finally:
        await bus.close()
