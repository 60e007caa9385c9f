"""A broker as it was before accounts: what could be done to it, and how its runs go on after the change."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from former_broker import former_broker
from reply_attacks import ANSWERED, harm_done

from broker.contract import wire
from broker.contract.examples import EXAMPLES
from broker.contract.streams import CONTROL, EPISODES, EVALS, RUNS, SAMPLES, STREAMS, TICKETS, WEIGHTS
from broker.errors import UserError
from broker.identity.login import find_login, keys_of
from broker.jetstream.bus import Bus
from broker.server.private_server import BrokerServer
from broker.server.stored_accounts import move_streams

SUCCEEDED = {
    "rollout": ("pull", "push", "flow control", "self grant"),
    "envhub": ("empty pull", "pull", "push", "self grant", "answer"),
    "rewardhub": ("empty pull", "pull", "push", "direct get", "empty direct get", "self grant"),
}


async def connect(url: str, run: str, role: str = "operator") -> Bus:
    return await Bus.connect(url, run, name=role, role=role, login=find_login(url, role, run), deadline_s=60)


async def fill(bus: Bus) -> None:
    await bus.ensure_streams()
    await bus.ensure_consumers(TICKETS, ["lake"])
    await bus.ensure_consumers(EPISODES, ["default"])
    await bus.publish(TICKETS, EXAMPLES[wire.Ticket], key="lake")
    for log in (SAMPLES, EVALS):
        await bus.publish(log, EXAMPLES[wire.Closed])
    await bus.publish(WEIGHTS, EXAMPLES[wire.WeightsOffer])
    await bus.key_value(RUNS).put(bus.run, EXAMPLES[wire.RunSpec])
    await bus.key_value(CONTROL).put(bus.run, wire.DesiredState(state="running"))


@pytest.mark.parametrize("whose", ["own", "other"])
@pytest.mark.parametrize(("role", "kind"), [(role, kind) for role, kinds in SUCCEEDED.items() for kind in kinds])
async def test_a_reply_got_anywhere(role: str, kind: str, whose: str, tmp_path: Path) -> None:
    with former_broker(tmp_path / "store") as server:
        runs = [await connect(server.url, run) for run in ("quick", "other")]
        for each in runs:
            await fill(each)
        responder = await connect(server.url, "quick", ANSWERED[role][2]) if kind == "answer" else None
        victim = runs[whose == "other"]
        assert await harm_done(server.url, role, kind, runs[0], victim, responder) != set()
        for each in (*runs, *([responder] if responder else [])):
            await each.close()
