"""Lets a server sleep while another process uses its device."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from broker.runtime.shared_devices import SharedDevices
from rollout.engines.base import SleepingEngine
from rollout.request_handler import RequestHandler

log = logging.getLogger(__name__)


class ServerTurns:
    """The turns of one engine on its devices; it has them when ``serve`` begins.

    Args:
        updates: held while weights are loaded, and by this class while the engine sleeps.
        rest: frees what belongs to the weights but is not the engine's.
        changed: called when the engine has fallen asleep or woken.

    Attributes:
        asleep: whether the engine sleeps.
    """

    def __init__(
        self,
        engine: SleepingEngine,
        devices: SharedDevices,
        requests: RequestHandler,
        updates: asyncio.Lock,
        rest: Callable[[], None],
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._devices = devices
        self._requests = requests
        self._updates = updates
        self._rest = rest
        self._changed = changed
        self._began = time.monotonic()
        self._asleep_s = self._since = self._sleep_s = self._wake_s = 0.0
        self.asleep = False

    async def serve(self) -> None:
        """Sleep whenever another process asks for the devices, until cancelled."""
        while True:
            await self._devices.until_asked()
            async with self._updates:
                await self._sleep()

    async def _sleep(self) -> None:
        began = time.monotonic()
        await self._requests.hold_scores()
        self._rest()
        await self._engine.sleep()
        self.asleep = True
        self._since = time.monotonic()
        self._changed()
        self._sleep_s = self._since - began
        log.info("asleep after %.2f s", self._sleep_s)
        await self._devices.release()
        await self._devices.acquire()
        acquired = time.monotonic()
        await self._engine.wake()
        self._requests.release_scores()
        self._wake_s = time.monotonic() - acquired
        slept_s = time.monotonic() - self._since
        self.asleep = False
        self._asleep_s = self._asleep_s + slept_s
        self._changed()
        log.info("awake again after %.2f s, of which loading %.2f s", slept_s, self._wake_s)

    def metrics(self) -> dict[str, float]:
        """Return the share of the time that the engine slept, and the seconds that its last sleep
        and waking took.
        """
        now = time.monotonic()
        slept_s = self._asleep_s + (now - self._since if self.asleep else 0.0)
        ratio = slept_s / max(now - self._began, 1e-9)
        return {
            "turns/asleep_ratio": ratio,
            "turns/sleep_seconds": self._sleep_s,
            "turns/wake_seconds": self._wake_s,
        }
