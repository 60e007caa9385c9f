"""This process's turns on shared devices; see ``device_party``."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Final

from broker.contract import wire
from broker.contract.streams import DEVICES
from broker.errors import LostState
from broker.jetstream.bus import Bus
from broker.nats.nats_errors import Disconnected
from broker.nats.subscription import LinkSubscription
from broker.runtime.device_party import RENEW_S, TTL_S, DeviceParty
from broker.runtime.member import Member
from broker.system.reminders import Reminders

log = logging.getLogger(__name__)

QUIET_S: Final = 5.0  # of waiting, before a log line says for whom
# Between two readings of a lease. A server does not hear what the learner changes: a subject
# crosses between two accounts of a broker in one direction only.
LOOK_S: Final = 0.25
# A put is seen before it is stored: read once more this much later.
AGAIN_S: Final = 0.1
FAREWELL_WITHIN_S: Final = 2.0
HOLDER_CHARS: Final = 64


class SharedDevices:
    """Turns on one or more devices.

    Devices are taken one after the other in the order of their names, so that no two processes wait
    for each other.

    Args:
        devices: names from ``broker.system.devices``.
        holder: names this start of the process.
        exclusive: nothing else may be on the devices during a turn, as a learner needs it.
    """

    def __init__(
        self,
        bus: Bus,
        devices: Sequence[str],
        holder: str,
        *,
        exclusive: bool,
        ttl_s: float = TTL_S,
    ) -> None:
        self._bus = bus
        self._holder = holder
        self._parties = {
            name: DeviceParty(holder, exclusive=exclusive, ttl_s=ttl_s) for name in sorted(devices)
        }
        self._pokes = {name: asyncio.Event() for name in self._parties}
        # device -> who claimed it, and whether they have it
        self._read: dict[str, list[tuple[str, bool]]] = {}
        self._changed = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []
        self._subscribed: LinkSubscription | None = None

    @property
    def held(self) -> bool:
        """Whether this process has all of the devices."""
        now = time.monotonic()
        return all(party.has(now) for party in self._parties.values())

    @property
    def asked(self) -> bool:
        """Whether another process waits for this one, or the devices were lost."""
        return not self.held or any(party.asked for party in self._parties.values())

    @property
    def failed(self) -> asyncio.Task[None] | None:
        """The task that ended by an error, if one has."""
        return next((task for task in self._tasks if task.done() and not task.cancelled()), None)

    async def start(self) -> None:
        """Begin to follow the leases; nothing is claimed yet."""
        self._subscribed = await self._bus.key_value(DEVICES).tap(self._bus.run, self._put)
        self._tasks = [asyncio.create_task(self._follow(name)) for name in self._parties]

    async def join(self) -> None:
        """Wait forever; raise the error that ended it."""
        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        if (failed := self.failed) is not None:
            failed.result()

    async def acquire(self) -> None:
        """Return once this process has all of the devices."""
        reminders = Reminders()
        began = time.monotonic()
        for name, party in self._parties.items():
            party.wanted = True
            self._pokes[name].set()
            while not party.has(time.monotonic()):
                now = time.monotonic()
                if party.blockers and now - began > QUIET_S and reminders.due(now):
                    log.info("waiting for device %s, used by %s", name, ", ".join(party.blockers))
                await self._news(partial(_has_now, party))

    async def release(self) -> None:
        """Give the devices up; call it once nothing of this process is on them. Returns when the
        broker knows it.
        """
        for name, party in self._parties.items():
            party.wanted = False
            self._pokes[name].set()
        while any(party.listed for party in self._parties.values()):
            await self._news(lambda: not any(party.listed for party in self._parties.values()))

    async def until_asked(self) -> None:
        """Wait until another process waits for this one, or the devices are lost."""
        while not self.asked:
            await self._news(lambda: self.asked)

    async def close(self) -> None:
        """Stop following, and withdraw the claims if possible; else they lapse."""
        with suppress(TimeoutError, Disconnected):
            async with asyncio.timeout(FAREWELL_WITHIN_S):
                if self._tasks and self.failed is None:
                    await self.release()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._subscribed is not None:
            await self._subscribed.close()

    async def _news(self, has_changed: Callable[[], bool]) -> None:
        """Wait for a change, a second at most: claims also end by the clock."""
        async with self._changed:
            if has_changed():
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(RENEW_S):
                    await self._changed.wait()
        if (failed := self.failed) is not None:
            failed.result()

    def _put(self, key: str, lease: wire.Message | None) -> None:
        """Read a lease at once if someone came, left or took the device; renewals can wait."""
        name = key.rpartition(".")[2]
        if name in self._pokes and _parties_of(lease) != self._read.get(name):
            self._pokes[name].set()

    async def _follow(self, name: str) -> None:
        poked = False
        while True:
            await self._exchange(name, self._parties[name])
            async with self._changed:
                self._changed.notify_all()
            poked = await _is_set_within(self._pokes[name], AGAIN_S if poked else LOOK_S)

    async def _exchange(self, name: str, party: DeviceParty) -> None:
        """Read the lease and change it until nothing has to be changed."""
        bucket = self._bus.key_value(DEVICES)
        key = f"{self._bus.run}.{name}"
        while True:
            entry = await bucket.get(key)
            lease, revision = entry if entry is not None else (None, 0)
            assert lease is None or isinstance(lease, wire.DeviceLease)
            self._read[name] = _parties_of(lease)
            next_lease = party.next(lease, time.monotonic())
            if next_lease is None:
                return
            sent_at = time.monotonic()
            try:
                new_revision = await (
                    bucket.create(key, next_lease)
                    if lease is None
                    else bucket.update(key, next_lease, revision)
                )
            except LostState:
                await bucket.ensure()
                continue
            if new_revision is not None:
                self._read[name] = _parties_of(next_lease)
                party.stored(next_lease, sent_at)
                return


@asynccontextmanager
async def sharing(
    member: Member, devices: Sequence[str], *, exclusive: bool
) -> AsyncIterator[SharedDevices | None]:
    """Open the turns of a process on these devices, None without any; nothing is claimed yet."""
    if not devices:
        yield None
        return
    # another start of this process must not pass for this one
    holder = f"{member.id[: HOLDER_CHARS - 7]}-{secrets.token_hex(3)}"
    opened = SharedDevices(member.bus, devices, holder, exclusive=exclusive)
    await opened.start()
    following = member.spawn(opened.join())
    try:
        yield opened
    finally:
        await opened.close()
        following.cancel()


def _parties_of(lease: wire.Message | None) -> list[tuple[str, bool]]:
    claims = lease.claims if isinstance(lease, wire.DeviceLease) else []
    return [(claim.holder, claim.granted) for claim in claims]


async def _is_set_within(event: asyncio.Event, timeout_s: float) -> bool:
    """Return whether the event is set within that time, and clear it."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    event.clear()
    return True


def _has_now(party: DeviceParty) -> bool:
    return party.has(time.monotonic())
