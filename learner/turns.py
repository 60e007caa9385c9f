"""The learner's turns on devices that rollout servers use in between."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from broker.runtime.shared_devices import SharedDevices

if TYPE_CHECKING:
    from learner.backends.base import Backend

log = logging.getLogger(__name__)

# Runs a job in the training thread.
RunJob = Callable[[Callable[[], None]], Awaitable[None]]


class DeviceTurns:
    """Moves a model onto its devices when a turn begins, and off them when it ends.

    Args:
        folder: for what a CPU holds, see ``Backend.offload``.

    Attributes:
        on_device: whether the model, if it is loaded, is on the devices.
    """

    def __init__(self, devices: SharedDevices, folder: Path) -> None:
        self._devices = devices
        self._folder = folder
        self._backend: Backend | None = None  # None: not loaded
        self._times = dict.fromkeys(
            ("time/turn_wait", "time/turn_load", "time/turn_offload", "turns/count"), 0.0
        )
        self.on_device = False

    def loaded(self, backend: Backend) -> None:
        """Note that the model was loaded onto the devices."""
        self._backend = backend

    async def begin(self, run: RunJob, unless: asyncio.Event | None = None) -> bool:
        """Wait for the devices and move the model onto them, unless it is there.

        Args:
            unless: ends the wait.

        Returns:
            False if the event ended the wait.
        """
        if self.on_device and self._devices.held:
            return True
        if self.on_device:
            log.warning("the shared device was lost: the claim to it was not renewed in time")
            await self.end(run)
        began_at = time.monotonic()
        if not await _await_unless(unless, self._devices.acquire()):
            return False
        acquired_at = time.monotonic()
        self.on_device = True
        if self._backend is not None:
            await run(self._backend.reload)
        self._times["time/turn_wait"] += acquired_at - began_at
        self._times["time/turn_load"] += time.monotonic() - acquired_at
        self._times["turns/count"] += 1
        return True

    async def end(self, run: RunJob) -> None:
        """Move the model off the devices and let others have them."""
        if not self.on_device:
            return
        began_at = time.monotonic()
        if self._backend is not None:
            await run(partial(self._backend.offload, self._folder))
        self.on_device = False
        self._times["time/turn_offload"] += time.monotonic() - began_at
        await self._devices.release()

    def values(self) -> dict[str, float]:
        """Return the turns since the last call: their number, and the seconds by activity."""
        times = self._times
        self._times = dict.fromkeys(self._times, 0.0)
        return times


async def _await_unless(event: asyncio.Event | None, work: Awaitable[None]) -> bool:
    """Await ``work``; return False if the event comes first, and cancel it."""
    if event is None:
        await work
        return True
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(event.wait())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            return False
        tasks[0].result()
        return True
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
