"""Time in which all servers sleep, or the event loop stands, is no time of an episode."""

from __future__ import annotations

import asyncio
import time

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


async def test_it_stands_while_the_event_loop_does() -> None:
    now = [100.0]
    clock = AwakeClock(lambda: now[0])
    watching = asyncio.create_task(clock.serve())
    await asyncio.sleep(0)
    now[0] += 0.5
    assert clock.now() == 100.5
    now[0] += 75  # frozen
    assert clock.now() == 101.0
    await asyncio.sleep(0.4)
    assert clock.now() == 101.0
    clock.note(True)
    now[0] += 75  # frozen while the servers sleep
    await asyncio.sleep(0.4)
    clock.note(False)
    assert clock.now() == 101.0
    now[0] += 0.5
    assert clock.now() == 101.5
    watching.cancel()


async def test_no_timeout_expires_by_a_loop_that_stood() -> None:
    clock = AwakeClock()
    watching = asyncio.create_task(clock.serve())
    await asyncio.sleep(0)
    async with clock.timeout(2.0) as limit:
        time.sleep(3.0)  # noqa: ASYNC251 - the point of the test
        await asyncio.sleep(0.1)
    assert not limit.expired()
    with pytest.raises(TimeoutError):
        async with clock.timeout(0.3):
            await asyncio.sleep(30)
    watching.cancel()
