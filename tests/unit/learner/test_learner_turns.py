"""The learner's turns: the model moves with them, a wait ends with a stop, and a lost device is
left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from learner.turns import DeviceTurns


class Devices:
    """Stands for the leases: granted when ``free`` is set."""

    def __init__(self, events: list[str]) -> None:
        self.events, self.free, self.held = events, asyncio.Event(), False
        self.free.set()

    async def acquire(self) -> None:
        await self.free.wait()
        self.held = True
        self.events.append("acquired")

    async def release(self) -> None:
        self.held = False
        self.events.append("released")


class Model:
    def __init__(self, events: list[str]) -> None:
        self.events = events

    def offload(self, folder: Path) -> None:
        self.events.append(f"offloaded to {folder}")

    def reload(self) -> None:
        self.events.append("reloaded")


async def run(job: Callable[[], None]) -> None:
    job()


def made() -> tuple[DeviceTurns, Devices, list[str]]:
    events: list[str] = []
    devices = Devices(events)
    turns = DeviceTurns(devices, Path("folder"))  # type: ignore[arg-type]
    return turns, devices, events


async def test_the_model_is_on_the_device_only_in_turns() -> None:
    turns, _, events = made()
    assert await turns.begin(run)  # to load it
    turns.loaded(Model(events))  # type: ignore[arg-type]
    assert await turns.begin(run)
    assert events == ["acquired"]
    await turns.end(run)
    await turns.end(run)
    assert await turns.begin(run)
    assert events == ["acquired", "offloaded to folder", "released", "acquired", "reloaded"]
    values = turns.values()
    assert values["turns/count"] == 2
    assert all(value >= 0 for value in values.values())
    assert set(turns.values().values()) == {0.0}


async def test_a_stop_ends_the_wait() -> None:
    turns, devices, events = made()
    turns.loaded(Model(events))  # type: ignore[arg-type]
    devices.free.clear()
    stopped = asyncio.Event()
    waiting = asyncio.create_task(turns.begin(run, stopped))
    await asyncio.sleep(0.01)
    stopped.set()
    assert not await waiting
    assert not turns.on_device
    assert events == []
    devices.free.set()
    assert await turns.begin(run)  # for the last checkpoint


async def test_a_device_that_was_lost_is_left_before_it_is_taken_again() -> None:
    turns, devices, events = made()
    turns.loaded(Model(events))  # type: ignore[arg-type]
    await turns.begin(run)
    devices.held = False  # the broker was away for longer than the lease lasts
    events.clear()
    await turns.begin(run)
    assert events == ["offloaded to folder", "released", "acquired", "reloaded"]
