"""A nats-server reads changed accounts while processes of all roles subscribe and publish."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest
from waits import LONG_S

from broker.contract.permissions import JOINING, LEARNER
from broker.identity.key_folder import BrokerUser, KeyFolder
from broker.identity.keys import Key
from broker.identity.login import find_login
from broker.jetstream.bus import Bus
from broker.nats.client import Msg
from broker.server.private_server import BrokerServer

RUNS = 4
RELOADS = 6


async def subscribe_forever(bus: Bus, count: list[int]) -> None:
    """Subscribe to what the role hears of others, again and again."""

    async def ignore(message: Msg) -> None:
        pass

    while True:
        # refused or cut off: as a hub would, it comes back
        with suppress(Exception):
            subscription = await bus.link.subscribe(f"rl.{bus.run}.presence.*.*", ignore)
            await subscription.close()
            count[0] += 1
        await asyncio.sleep(0)


@pytest.mark.timeout(240)
async def test_a_reload_survives_subscriptions(tmp_path: Path) -> None:
    keys = KeyFolder(tmp_path / "store.keys")
    for number in range(RUNS):
        for role in (LEARNER, *JOINING):
            keys.role(role, f"run-{number}")
    with BrokerServer(str(tmp_path / "store"), store_max_gib=64) as server:
        buses = [
            await Bus.connect(
                server.url,
                "run-0",
                name=role,
                role=role,
                login=find_login(server.url, role, "run-0"),
                deadline_s=LONG_S,
            )
            for role in (LEARNER, *JOINING)
        ]
        count = [0]
        tasks = [asyncio.create_task(subscribe_forever(bus, count)) for bus in buses]
        try:
            for number in range(RELOADS):
                user = BrokerUser(
                    Key.generate().public, "envhub", "run-1", name=f"host-{number}", expires_at=0
                )
                await asyncio.to_thread(keys.admit, user)
                assert server.running, server.log_path.read_text()[-2000:]
            assert count[0] > RELOADS
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for bus in buses:
                with suppress(TimeoutError):  # without a server
                    async with asyncio.timeout(5.0):
                        await bus.close()
