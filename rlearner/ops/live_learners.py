"""Asks a broker whether runs have a live learner."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Final

from broker.contract import wire
from broker.errors import BrokerUnreachable
from broker.jetstream.bus import Bus
from broker.nats import addresses
from broker.runtime.presence import census
from broker.settings.runspec import find_runs
from learner.run_folder import DEADLINE_S
from rlearner.doctor.broker_checks import read_server_info

FORGOTTEN: Final = ", which no longer knows the run"


async def ask_broker(url: str, run: str) -> tuple[list[wire.Presence], str]:
    """Return the run's live learners, and the broker's problem if any (``, which does not …``)."""
    return (await ask_broker_of_runs(url, [run]))[run]


async def ask_broker_of_runs(
    url: str, runs: Sequence[str]
) -> dict[str, tuple[list[wire.Presence], str]]:
    """Return what ``ask_broker`` does for several runs of one broker, over one connection."""
    answers = await asyncio.gather(
        *(asyncio.to_thread(read_server_info, server) for server in addresses.split_servers(url))
    )
    # A client that cannot connect would retry until its deadline; this answers within a second.
    if not any(info for info, _ in answers):
        return dict.fromkeys(runs, ([], f", which does not answer ({answers[0][1]})"))
    try:
        bus = await Bus.connect(url, runs[0], name=f"operator-{os.getpid()}", deadline_s=DEADLINE_S)
    except BrokerUnreachable as error:
        return dict.fromkeys(runs, ([], f", where {error}"))
    try:
        runs_of_broker = await find_runs(bus)
        censuses = await asyncio.gather(*(census(bus, run) for run in runs))
    finally:
        await bus.close()
    learners: dict[str, tuple[list[wire.Presence], str]] = {}
    for run, processes in zip(runs, censuses, strict=True):
        # A broker that has lost its store, or had another one before.
        problem = "" if run in runs_of_broker else FORGOTTEN
        learners[run] = [presence for presence in processes if presence.role == "learner"], problem
    return learners
