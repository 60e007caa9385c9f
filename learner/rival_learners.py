"""Refuses to start while another learner of the run is alive.

Every learner sends presence beats (``broker.runtime.announce``) before it loads anything. It checks
for a holder of the run before that, and again right before it takes the epoch. The members bucket
and the run's folder name the last holder's process; unless it has ended, the learner waits for its
beats for at most one presence TTL.
"""

from __future__ import annotations

from pathlib import Path

from broker.contract import wire
from broker.contract.streams import MEMBERS
from broker.errors import UserError
from broker.jetstream.bus import Bus
from broker.runtime.announce import member_key
from broker.runtime.presence import SILENT_AFTER_S, TICK_S, Roster
from broker.settings.runspec import newest_epoch
from broker.system.process_identity import has_ended, this_process
from learner.reporting.status import ID
from learner.run_folder import noted_epoch, noted_holder

# A holder of which only the epoch is known.
UNKNOWN_PROCESS = ""


class RivalDetector:
    """Detector of other learners of a run.

    Args:
        folder: of the run.
    """

    def __init__(self, bus: Bus, folder: Path) -> None:
        self._bus = bus
        self._folder = folder
        self._process = this_process()
        self._roster = Roster(bus, beats=("learner",), on_change=self._note_beat)
        # By process: the newest beat, and when on the roster's clock.
        self._beats: dict[str, tuple[wire.Presence, float]] = {}
        self._cleared = -1  # newest epoch whose holder has ended

    async def start(self) -> None:
        """Start listening."""
        await self._roster.start()

    async def close(self) -> None:
        """Stop listening."""
        await self._roster.close()

    async def refuse(self) -> int:
        """Return the newest epoch once no other learner holds the run; wait one TTL at most.

        The first call also refuses if another learner is still starting. Later calls refuse only a
        learner that has taken the epoch: of two that start at the same moment, one does.

        Raises:
            UserError: if another learner is alive; names its host and process.
        """
        epoch = await newest_epoch(self._bus, self._bus.run)
        is_first = self._cleared < 0
        if epoch > self._cleared:
            holders = await self._holders(epoch)
            began_at = self._roster.clock
            while (
                holders
                and self._roster.clock - began_at < SILENT_AFTER_S
                and not self._alive(is_first)
            ):
                holders = {holder for holder in holders if not has_ended(holder)}
                if holders:
                    await self._roster.changed(TICK_S)
        if rival := self._alive(is_first):
            job = f" ({rival.job})" if rival.job else ""
            name = f"a learner on {rival.host}, process {rival.pid}{job}"
            raise UserError(
                f"run {self._bus.run} is being trained by {name}; --take-over takes it over"
            )
        self._cleared = epoch
        return epoch

    async def _holders(self, epoch: int) -> set[str]:
        """Return the processes that may hold the run under an epoch."""
        entry = await self._bus.key_value(MEMBERS).get(member_key(self._bus.run, "learner", ID))
        noted = noted_epoch(self._folder)
        processes = set[str]()
        if entry is not None and isinstance(entry[0], wire.Presence):
            processes.add(entry[0].process)
        if noted:
            processes.add(noted_holder(self._folder))
        # Taken by a learner of another folder, or just now.
        if epoch > noted:
            processes.add(UNKNOWN_PROCESS)
        return processes - {self._process}

    def _alive(self, is_first: bool) -> wire.Presence | None:
        """Return a learner that sent a beat within one presence TTL and counts as a holder."""
        now = self._roster.clock
        for process, (presence, heard_at) in self._beats.items():
            if (
                now - heard_at < SILENT_AFTER_S
                and (is_first or presence.epoch)
                and not has_ended(process)
            ):
                return presence
        return None

    def _note_beat(self, presence: wire.Presence, is_alive: bool) -> None:
        if not is_alive:
            # A learner has left; the others beat again within two seconds.
            self._beats.clear()
        elif presence.process != self._process:
            self._beats[presence.process] = (presence, self._roster.clock)
