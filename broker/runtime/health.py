"""Health of a process: its state, one line of status, and whether its event loop turns.

``stop.health`` is the only one of a process. ``process.main`` keeps it beating; a service manager
and the pages ``/healthz`` and ``/readyz`` read it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final, Literal

from broker.contract import wire
from broker.errors import described

log = logging.getLogger(__name__)

State = Literal["starting", "ready", "draining", "failed"]
Report = tuple[State, str]  # state and status

BEAT_S: Final = 1.0
# a loop that beat within this time turns; more than any pause that was measured
TURNS_WITHIN_S: Final = 30.0
_STATES: Final[dict[str, State]] = {"serving": "ready", "starting": "starting", "failed": "failed"}
_WORK: Final = {
    "learner": "groups",
    "rollout": "requests",
    "envhub": "episodes",
    "rewardhub": "groups",
}


class Health:
    """State of this process, read by others from any thread, changed on the event loop.

    Attributes:
        state: ``starting`` until it takes work, then ``ready``; ``failed`` while it cannot take
            any; ``draining`` from the request to stop on.
        status: one line for operators, such as the run, the step or version, and the load.
        has_joined: whether it has all that it can get by itself: it has reached its broker and
            found no error of the user's. What it then waits for, a run or weights, comes from
            others, in any order.
        beat: ``time.monotonic()`` of the event loop's last beat.
        lag_s: longest delay of a beat so far, in seconds.
        beat_every_s: time between two beats.
        listeners: called on the event loop after each beat and each change.
    """

    def __init__(self) -> None:
        self.state: State = "starting"
        self.status = "starting"
        self.has_joined = False
        self.beat = time.monotonic()
        self.lag_s = 0.0
        self.beat_every_s = BEAT_S
        self.listeners: list[Callable[[Health], None]] = []
        self._source: Callable[[], Report] | None = None
        self._is_draining = False

    @property
    def is_ready(self) -> bool:
        """Whether the process takes work: ``/readyz``."""
        return self.state == "ready"

    def is_turning(self, within_s: float = TURNS_WITHIN_S) -> bool:
        """Return whether the event loop turned within a time: ``/healthz``; from any thread."""
        return time.monotonic() - self.beat < max(within_s, 2 * self.beat_every_s)

    def joined(self) -> None:
        """Note that the process has all that it can get by itself."""
        self.has_joined = True
        self._tell()

    def drain(self, reason: str) -> None:
        """Note that a stop was requested; the state stays ``draining``."""
        self._is_draining = True
        self.set("draining", f"stopping: {reason}")

    def set(self, state: State, status: str) -> None:
        """Set state and status, which no source gives from then on."""
        self._source = None
        self.state = "draining" if self._is_draining else state
        self.status = status
        self._tell()

    def follow(self, source: Callable[[], Report]) -> None:
        """Take state and status from a function, at each beat."""
        self._source = source
        self.refresh()

    def refresh(self) -> None:
        if self._source is not None:
            try:
                state, self.status = self._source()
            # The same error ends a process that announces itself.
            except Exception as error:  # noqa: BLE001
                log.debug("no health: %s", error)
                state = "failed"
                self.status = described(error)
            self.state = "draining" if self._is_draining else state
        self._tell()

    async def keep_beating(self) -> None:
        """Beat until cancelled."""
        while True:
            self.beat = time.monotonic()
            self.refresh()
            await asyncio.sleep(self.beat_every_s)
            self.lag_s = max(self.lag_s, time.monotonic() - self.beat - self.beat_every_s)

    def _tell(self) -> None:
        for listener in tuple(self.listeners):
            listener(self)


def report_of(run: str, presence: wire.Presence, doing: str = "") -> Report:
    """Return the health of a process that announces itself.

    Args:
        doing: what a learner does at present.
    """
    parts = []
    if presence.policy_version >= 0:
        parts.append(
            f"{'step' if presence.role == 'learner' else 'version'} {presence.policy_version}"
        )
    if presence.slots:
        parts.append(f"{presence.running} of {presence.slots} {_WORK.get(presence.role, 'jobs')}")
    if presence.waiting:
        parts.append(f"{presence.waiting} waiting")
    parts += [
        *filter(
            None, (",".join(presence.serves), "asleep" * presence.asleep, presence.problem, doing)
        )
    ]
    return _STATES.get(
        presence.state, "draining"
    ), f"run {run}: {', '.join(parts) or presence.state}"
