"""Time in which all servers sleep is no time of an episode."""

from __future__ import annotations

import asyncio

import pytest

from envhub.servers.awake_clock import AwakeClock


def test_it_stands_while_the_servers_sleep() -> None:
    now = [100.0]
    clock = AwakeClock(lambda: now[0])
    now[0] += 5
    assert clock.now() == 105.0
    clock.note(True)
    now[0] += 60
    assert clock.now() == 105.0
    clock.note(True)  # still
    now[0] += 60
    clock.note(False)
    clock.note(False)
    assert clock.now() == 105.0
    now[0] += 1
    assert clock.now() == 106.0
    clock.note(True)
    now[0] += 7
    clock.note(False)
    assert clock.now() == 106.0


async def test_a_timeout_waits_for_servers_that_sleep() -> None:
    clock = AwakeClock()
    loop = asyncio.get_running_loop()
    loop.call_later(0.1, clock.note, True)
    loop.call_later(0.6, clock.note, False)
    began = loop.time()
    with pytest.raises(TimeoutError):
        async with clock.timeout(0.3) as limit:
            await asyncio.sleep(5)
    assert limit.expired()
    assert 0.75 < loop.time() - began < 3

    clock.note(True)
    async with clock.timeout(0.05):  # begun while they sleep
        await asyncio.sleep(0.2)
        clock.note(False)
    with pytest.raises(TimeoutError):
        async with clock.timeout(0.05):
            await asyncio.sleep(5)
