"""Holds back tickets before the broker's store is full, and keeps the run's reserve filled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

from broker.contract.streams import EPISODES, PARTS, RESERVE, SAMPLES, TICKETS
from broker.jetstream import reserve
from broker.jetstream.api import call_api
from broker.jetstream.bus import Bus
from broker.nats.nats_errors import ApiError, Disconnected, NoResponders
from broker.system.recent_warning import forget_warning
from learner.credit.ledger import Ledger
from learner.credit.store_budget import StoreBudget, StoreUsage

log = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 3.0
# Share of that until the first groups arrive: a guess of their size might let tickets fill the
# store.
FIRST_LOOK_SHARE: Final = 0.1
GIB: Final = 1 << 30
# One message for each group, or for its closing.
GROUPS: Final = (EPISODES, SAMPLES)
# Streams that grow with the run.
GROWING: Final = (TICKETS, PARTS, *GROUPS)


class StoreGate:
    """Service around ``StoreBudget``.

    Args:
        limit_gib: the configured limit of the store, None if there is none.
        press_from_gib: replaces an unknown limit.
        say: receives a text when tickets wait, and an empty one when they no longer do.
        relieve: trims the log, at each check while tickets wait or the broker refuses messages.
    """

    def __init__(
        self,
        bus: Bus,
        ledger: Ledger,
        limit_gib: float | None,
        press_from_gib: float,
        say: Callable[[str], None],
        relieve: Callable[[], Awaitable[None]],
    ) -> None:
        self._bus = bus
        self._ledger = ledger
        self._say = say
        self._relieve = relieve
        self._budget = StoreBudget(
            None if limit_gib is None else int(limit_gib * GIB), int(press_from_gib * GIB)
        )
        self._checked = asyncio.Event()
        self._waiting = 0
        self._newest = 0  # ticket that was admitted, or published before this learner
        self._admitted = 0  # since the newest check began
        self._is_closed = False

    @property
    def pressed(self) -> bool:
        """Whether a checkpoint should be taken soon, so that the log can be trimmed."""
        return self._budget.pressed

    async def wait(self, number: int) -> None:
        """Wait until this ticket may be published; call this in ticket order."""
        self._waiting += 1
        try:
            while not self._budget.admit(needed=not self._ledger.full):
                self._close()
                await self._checked.wait()
            self._newest = number
            self._admitted = self._admitted + 1
        finally:
            self._waiting -= 1

    async def serve(self) -> None:
        """Check every few seconds until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S * (1.0 if self._budget.measured else FIRST_LOOK_SHARE))
            await self.look()

    async def look(self) -> None:
        """Check the broker's store now, and admit tickets if it has room."""
        try:
            self._newest = self._newest or await self._bus.last_seq(TICKETS)
            # Before the request: a group stored after the broker's response still counts as
            # expected.
            under_way = sum(number <= self._newest for number in self._ledger.waiting_for)
            self._admitted = 0
            usage, reserved = await self._usage()
            self._budget.look(usage, under_way + self._admitted)
            if not self._budget.pressed:
                await reserve.fill_reserve(self._bus.link, self._bus.run, reserved)
            if self._is_closed or not usage.stores:
                await self._relieve()
        except (Disconnected, TimeoutError, NoResponders, ApiError) as error:
            log.debug("the usage of the broker's store is unknown: %s", error)
            return
        if self._is_closed and self._budget.relaxed and not self._waiting:
            self._is_closed = False
            log.warning("the broker's store has room again (%s); tickets go on", self._figures())
            forget_warning(log)
            self._say("")
        checked = self._checked
        self._checked = asyncio.Event()
        checked.set()

    async def _usage(self) -> tuple[StoreUsage, int]:
        """Return the usage of the broker's store, and the bytes of the reserve."""
        reserved, *infos = await asyncio.gather(
            *(self._bus.info(stream) for stream in (RESERVE, *GROWING))
        )
        # After the streams: messages stored in between count as others'.
        account = await call_api(self._bus.link, "INFO")
        used, limit = replica_usage(account, int(reserved["config"]["num_replicas"]))
        states = [info["state"] for info in infos]
        run_bytes = sum(int(state["bytes"]) for state in states)
        groups = sum(
            int(state["messages"])
            for stream, state in zip(GROWING, states, strict=True)
            if stream in GROUPS
        )
        has_room = await reserve.has_room(self._bus.link, self._bus.run)
        usage = StoreUsage(used, run_bytes, groups, limit=limit, stores=has_room)
        return usage, int(reserved["state"]["bytes"])

    def _close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            problem = f"the broker's store is nearly full ({self._figures()})"
            text = f"{problem}: tickets wait until a checkpoint lets the log be trimmed"
            log.warning("%s", text)
            self._say(text)

    def _figures(self) -> str:
        usage = self._budget.usage
        limit = self._budget.limit
        total = f"{_format_size(usage.used)} of {_format_size(limit or 0)}"
        return f"{total}, {_format_size(usage.run)} of it this run's"


def _format_size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / (1 << 20):.1f} MiB"


def replica_usage(account: dict[str, Any], replicas: int) -> tuple[int, int | None]:
    """Return (used, limit) of a single replica."""
    tier = (account.get("tiers") or {}).get(f"R{replicas}")
    used = int((tier or account)["storage"]) // replicas
    limit = int((tier or account)["limits"]["max_storage"])
    if limit <= 0:
        return used, None
    # The account counts all replicas, but a limit by tier only one.
    return used, limit if tier else limit // replicas
