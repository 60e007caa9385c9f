"""A run of three hosts that is joined with tokens: processes are killed, hosts cut off, a token
revoked.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from chaos_world import LIMIT_S, World, world

from bench.support.fleet import RunProcess
from bench.support.hosts.host_fleet import HostFleet, hosts_of_a_fleet
from bench.support.hosts.network_namespaces import HostNetwork, why_not

# longer than the TTL of presence; `make hosts` has 30
CUT_S = float(os.environ.get("RL_HOSTS_CUT_S", "6"))
REFUSED_WITHIN_S = 20.0  # a hub does not wait for episodes whose groups nobody would take
LAYOUT = {"rollout": [1], "envhub": [2], "rewardhub": [2]}
pytestmark = pytest.mark.skipif(
    bool(why_not()), reason=why_not() or "there can be network namespaces"
)


@pytest.fixture
def network() -> Iterator[HostNetwork]:
    with hosts_of_a_fleet(3) as made:
        yield made


def make(network: HostNetwork, folder: Path, run: str) -> HostFleet:
    """Two servers on the second host, two environment hubs and two reward hubs on the third."""
    hidden = [folder.parent / "runs"]
    return HostFleet(
        folder, run, bind=network.addresses[0], network=network, layout=LAYOUT, hidden=hidden
    )


async def cut_off(w: World, network: HostNetwork, host: int) -> None:
    """Cut a host off, and wait until what was in flight has arrived."""
    pending = await w.watch.in_flight()
    network.set_link(host, up=False)
    await asyncio.sleep(CUT_S)
    network.set_link(host, up=True)
    await w.watch.until(lambda: pending <= w.watch.first.keys(), LIMIT_S)


@pytest.mark.timeout(600)
async def test_nothing_is_lost_between_hosts(tmp_path: Path, network: HostNetwork) -> None:
    async with world(tmp_path, "hosts", 40, 0.3, make_fleet=partial(make, network)) as w:
        fleet = w.fleet
        assert isinstance(fleet, HostFleet)
        await w.reach(2)
        for role in ("rollout", "envhub", "rewardhub", "learner"):
            victim = fleet.of(role)[0]

            async def strike(victim: RunProcess = victim) -> None:
                victim.kill()

            await w.watch.recovery_s(role, strike, LIMIT_S)
        await w.watch.recovery_s("broker", fleet.restart_broker, LIMIT_S)
        for host in (1, 2):
            await cut_off(w, network, host)
        revoked = fleet.of("envhub")[1]
        fleet.revoke(revoked)
        await w.watch.until(lambda: revoked.has_ended, REFUSED_WITHIN_S)
        fleet.add("envhub", "envhub-2")
        before = w.watch.step()
        await w.reach(before + 3)
        await w.finish()
