"""The window of bytes on the wire grows with quick answers and serves the oldest owner first."""

from __future__ import annotations

import asyncio

import pytest

from broker.jetstream import flight_window
from broker.jetstream.flight_window import LEAST_BYTES, MOST_BYTES, FlightWindow

MIB = 1 << 20


async def test_lowest_owner_goes_first() -> None:
    window, order = FlightWindow(), list[int]()
    release = asyncio.Event()

    async def request(owner: int) -> None:
        async with window.slot(owner, LEAST_BYTES):
            order.append(owner)
            await release.wait()

    tasks = [asyncio.create_task(request(5))]
    await asyncio.sleep(0)
    tasks += [asyncio.create_task(request(owner)) for owner in (9, 7, 8)]
    await asyncio.sleep(0)
    assert order == [5]
    window._adapt = lambda *_: None  # type: ignore[method-assign]
    release.set()
    await asyncio.gather(*tasks)
    assert order == [5, 7, 8, 9]


async def test_window_grows_with_quick_answers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    window = FlightWindow()
    for _ in range(4):
        async with window.slot(1, MIB):
            pass
    assert window.limit == LEAST_BYTES + 4 * MIB
    for _ in range(40):
        async with window.slot(1, MIB):
            pass
    assert window.limit == MOST_BYTES
    monkeypatch.setattr(flight_window, "QUICK_S", -1.0)
    limits = []
    for _ in range(3):
        async with window.slot(1, MIB):
            pass
        limits.append(window.limit)
    assert limits == [MOST_BYTES // 2, LEAST_BYTES, LEAST_BYTES]


async def test_answer_above_the_limit_goes_alone() -> None:
    window = FlightWindow()
    async with window.slot(1, 10 * LEAST_BYTES):
        waiting = asyncio.create_task(window._enter(2, MIB))
        await asyncio.sleep(0)
        assert not waiting.done()
    await waiting


async def test_cancelled_request_leaves_its_room() -> None:
    window = FlightWindow()
    await window._enter(1, LEAST_BYTES)
    waiting, next_one = (asyncio.create_task(window._enter(owner, MIB)) for owner in (2, 3))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    window._used -= LEAST_BYTES
    window._grant()
    await next_one
    assert (window._used, window._waiting) == (MIB, [])


async def test_request_cancelled_as_its_turn_comes_leaves_its_room() -> None:
    window = FlightWindow()
    await window._enter(1, LEAST_BYTES)
    waiting = asyncio.create_task(window._enter(2, MIB))
    await asyncio.sleep(0)
    window._used -= LEAST_BYTES
    window._grant()
    assert window._used == MIB
    waiting.cancel()  # granted, and not resumed yet
    await asyncio.gather(waiting, return_exceptions=True)
    assert window._used == 0
