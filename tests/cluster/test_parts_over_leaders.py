"""Groups in parts in a cluster whose streams change their leaders: each is read whole, by every
life of a learner.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

from broker_cluster import NODES, ClusterNodes
from large_groups import MB
from loop_kit import opened_ledger, running_loop, scored_group
from waits import until

from broker.contract.streams import PARTS, SAMPLES
from broker.jetstream.api import call_api
from broker.jetstream.bus import Bus
from broker.nats.nats_errors import ApiError

GROUPS = 18
SIZE = 3 * MB


async def change_leaders(bus: Bus, stop: asyncio.Event) -> int:
    """Have the leaders of both streams step down again and again; return how often they did."""
    times = 0
    for stream in itertools.cycle((PARTS, SAMPLES)):
        if stop.is_set():
            return times
        try:
            await call_api(bus.link, f"STREAM.LEADER.STEPDOWN.{stream.stream_name(bus.run)}")
            times += 1
        except ApiError:  # no leader at the moment
            pass
        await asyncio.sleep(0.7)
    raise AssertionError("never reached")


async def test_leaders_change_while_groups_in_parts_are_stored_and_read(tmp_path: Path) -> None:
    nodes = ClusterNodes(tmp_path / "cluster")
    try:
        await asyncio.to_thread(nodes.start_all)
        reader, hub, operator = [
            await Bus.connect(nodes.url, "demo", name=n, deadline_s=60) for n in "rho"
        ]
        await reader.ensure_streams()
        ledger = opened_ledger(groups_per_step=GROUPS + 1, max_staleness=0)
        stop = asyncio.Event()
        changing = asyncio.create_task(change_leaders(operator, stop))
        async with running_loop(reader, ledger) as loop:
            for number in range(1, GROUPS + 1):
                sent = scored_group(ledger.ticket(number), SIZE)
                await hub.publish(SAMPLES, sent, ticket=number, message_id=f"tickets-{number}")
                if number % 3 == 0:  # redelivered to another hub, whose record comes late
                    await hub.publish(SAMPLES, sent, ticket=number, message_id=f"late-{number}")
                if number % 6 == 0:
                    await nodes.restart(number // 6 % NODES, after_s=1.0)
            last = GROUPS + GROUPS // 3
            await until(lambda: ledger.state.position >= last or loop.done(), within_s=180)
            assert not loop.done(), loop.exception()
        stop.set()
        assert await changing >= 3
        counts = ledger.counts()
        assert (counts["open"], counts["duplicate"], counts["dead"]) == (GROUPS + 1, GROUPS // 3, 0)
        assert len(ledger.arrived) == GROUPS
        again = opened_ledger(groups_per_step=GROUPS + 1, max_staleness=0)
        async with running_loop(operator, again) as loop:
            await until(lambda: again.state.position >= last or loop.done(), within_s=180)
        assert again.dump() == ledger.dump()
        for bus in (reader, hub, operator):
            await bus.close()
    finally:
        await asyncio.to_thread(nodes.stop)
