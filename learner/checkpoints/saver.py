"""Writes checkpoints in the background: training waits only for a copy in memory."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from broker.contract.streams import SAMPLES
from broker.errors import UserError, described
from broker.jetstream.bus import Bus
from broker.runtime.process import Stop
from learner.checkpoints import checkpoint
from learner.checkpoints.checkpoint_schedule import CheckpointSchedule
from learner.config import CheckpointSection
from learner.credit.ledger import Ledger
from learner.credit.records import LedgerRecorder
from learner.disk_retry import DiskRetry
from learner.run_watch import EpochWatch
from learner.training import TrainingThread

if TYPE_CHECKING:
    from learner.backends.base import Snapshot

log = logging.getLogger(__name__)

# At the end, longest wait for a broker that does not answer: a stop must not hang.
PARTING_S: Final = 10.0


class CheckpointSaver:
    """Writer of one checkpoint at a time; prunes and trims the log only behind those on disk.

    Args:
        folder: ``runs/<name>/checkpoints``.
        say: receives a text when training has to wait, and an empty one afterwards.
        newest_step: step of the newest checkpoint there, -1 if there is none.
        pressed: returns whether the broker's store needs the log trimmed soon.
        store_pass_rates: writes those of a dumped ledger next to its checkpoint.
    """

    def __init__(
        self,
        folder: Path,
        section: CheckpointSection,
        bus: Bus,
        ledger: Ledger,
        training: TrainingThread,
        records: LedgerRecorder,
        watch: EpochWatch,
        stop: Stop,
        say: Callable[[str], None],
        newest_step: int = -1,
        pressed: Callable[[], bool] = lambda: False,
        store_pass_rates: Callable[[Mapping[str, Any]], None] = lambda ledger: None,
    ) -> None:
        self._folder = folder
        self._keep = section.keep
        self._hf_max_gib = section.hf_max_gib
        self._bus = bus
        self._ledger = ledger
        self._training = training
        self._records = records
        self._watch = watch
        self._stop = stop
        self._schedule = CheckpointSchedule(
            section.every_steps, section.every_minutes * 60, time.monotonic(), section.keep
        )
        self._disk_retry = DiskRetry(
            folder, stop, "no checkpoint is written and the log is not trimmed", say
        )
        self._say = say
        self._written_step = newest_step
        self._pressed = pressed
        self._store_pass_rates = store_pass_rates
        # Step of the checkpoint behind which the log was trimmed for lack of room.
        self._relieved_step = -1
        self._writing: asyncio.Task[None] | None = None
        # Step of the state that was copied last, which may not be written yet.
        self._copied_step = newest_step
        # Whether the operator's checkpoint was not taken yet.
        self._by_operator = False
        # Set when that may be taken without waiting for the end of a step.
        self.requested = asyncio.Event()
        self._times: dict[str, float] = {}

    def values(self) -> dict[str, float]:
        """Return metrics since the last call: seconds of waiting for the copy, and of writing."""
        times = self._times
        self._times = {}
        return {"time/checkpoint": 0.0} | times

    async def open(self) -> None:
        """Trim the log, in case an earlier incarnation was killed before it could."""
        if paths := checkpoint.list_checkpoints(self._folder):
            try:
                await self._trim(paths[0])
            except UserError as error:
                # The run need not end: it does not resume from its oldest checkpoint.
                log.warning("%s; the log is not trimmed behind it", error)

    async def relieve(self) -> None:
        """Trim the log behind the newest whole checkpoint, from which alone the run resumes then.

        Its files are read first: were they damaged, the run could not be resumed at all.

        Raises:
            Fenced: if a newer learner holds the run.
        """
        if self._written_step <= self._relieved_step:
            return
        paths = checkpoint.list_checkpoints(self._folder)
        # Behind the oldest one the log is trimmed already.
        if len(paths) < 2:
            return
        self._relieved_step = self._written_step
        for path in reversed(paths[1:]):
            if await self._is_whole(path):
                log.warning(
                    "the log is trimmed behind %s to make room in the broker's store; "
                    "the run resumes only from it",
                    path,
                )
                await self._trim(path)
                return

    async def _is_whole(self, path: Path) -> bool:
        """Return whether a checkpoint has the bytes that were written; if not, make one due."""
        try:
            await asyncio.to_thread(checkpoint.verify_checkpoint, path)
        except UserError as error:
            log.error("%s; the log is not trimmed behind this checkpoint", error)
            self._schedule.press()
            return False
        return True

    async def at_boundary(self, ledger: dict[str, Any]) -> None:
        """Take a checkpoint after a completed step if one is due and none is being written.

        Args:
            ledger: dumped at this boundary.
        """
        self._schedule.completed(ledger["version"], time.monotonic(), failing=self._failing)
        if self._pressed():
            self._schedule.press()
        if self._schedule.must_wait(failing=self._failing):
            await self._wait_for_space()
        if self._schedule.due and not self._busy:
            await self._take(ledger)

    def request(self) -> None:
        """Make a checkpoint due now, for the operator."""
        self._schedule.press()
        self._by_operator = True
        self.requested.set()

    async def between_steps(self, ledger: dict[str, Any]) -> None:
        """Take the operator's checkpoint while no group of the next step was trained on.

        Args:
            ledger: dumped at the last boundary.
        """
        if self._by_operator and not self._busy and ledger["version"] != self._copied_step:
            await self._take(ledger)

    @property
    def pending(self) -> bool:
        """Whether the operator asked for a checkpoint that is not taken yet."""
        return self._by_operator

    @property
    def written(self) -> int:
        """Step of the newest checkpoint on disk, -1 if there is none."""
        return self._written_step

    @property
    def writing(self) -> int:
        """Step of the checkpoint that is being written, -1 if none is."""
        return self._copied_step if self._busy else -1

    @property
    def problem(self) -> str:
        """Why the newest checkpoint cannot be written, empty if it can."""
        if not self._busy:
            return ""
        return self._disk_retry.reason

    async def finish(self, ledger: dict[str, Any]) -> None:
        """Write the state of the last boundary unless that is done; return when it is on disk.

        On a stop without a reachable broker none is written, because another learner may hold the
        run: the next incarnation resumes from the previous checkpoint and the log.

        Raises:
            UserError: if the folder cannot be written, and a stop is requested.
            Fenced: if a newer learner holds the run.
        """
        if self._stop.asked.is_set() and not await self._is_ours():
            text = "no broker confirms that the run is ours: no checkpoint of step %d is written"
            log.warning(text, ledger["version"])
            if self._writing is not None:
                self._writing.cancel()
            return
        if self._writing is not None:
            await self._writing
        if ledger["version"] != self._written_step:
            await self._training.undo()
            await self._take(ledger)
            assert self._writing is not None
            await self._writing

    async def _is_ours(self) -> bool:
        try:
            async with asyncio.timeout(PARTING_S):
                await self._watch.refuse_if_fenced()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Wait until nothing is being written; errors were raised already."""
        if self._writing is not None:
            await asyncio.wait({self._writing})

    @property
    def _busy(self) -> bool:
        return self._writing is not None and not self._writing.done()

    @property
    def _failing(self) -> bool:
        return self._busy and bool(self._disk_retry.reason)

    async def _wait_for_space(self) -> None:
        assert self._writing is not None
        log.error("%s: training waits until a checkpoint can be written", self._folder)
        self._say(f"{self._disk_retry.reason}; training waits")
        stop_wait = asyncio.ensure_future(self._stop.asked.wait())
        try:
            await asyncio.wait({self._writing, stop_wait}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop_wait.cancel()
            with suppress(asyncio.CancelledError):
                await stop_wait

    async def _take(self, ledger: dict[str, Any]) -> None:
        if self._writing is not None:
            # It is done; this raises its error.
            await self._writing
        began = time.monotonic()
        with self._training.spans.work("checkpoint", step=ledger["version"]):
            snapshot = await self._training.call(self._training.backend.snapshot)
        self._times["time/checkpoint"] = time.monotonic() - began
        self._schedule.taken(time.monotonic())
        self._copied_step = ledger["version"]
        self._by_operator = False
        self._writing = asyncio.create_task(self._write(snapshot, ledger))
        # A write that fails ends the run at once, not at the next checkpoint.
        self._writing.add_done_callback(self._failed)

    def _failed(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._stop.request(described(error))

    async def _write(self, snapshot: Snapshot, ledger: dict[str, Any]) -> None:
        """Write a checkpoint, delete the oldest, and trim the log behind those that are kept."""
        # The records that the checkpoint covers must be on disk before it: a resume skips them.
        await self._records.sync()
        began = time.monotonic()
        path = await self._disk_retry(lambda: self._try(snapshot, ledger))
        snapshot.drop()
        self._written_step = ledger["version"]
        self._times["time/checkpoint_write"] = time.monotonic() - began
        log.info("checkpoint %s", path)
        await self._disk_retry.in_thread(self._store_pass_rates, ledger)
        paths = await self._disk_retry.in_thread(
            checkpoint.prune_checkpoints, self._folder, self._keep
        )
        # If it is the only one, nothing but the log could replace it, so it is read first.
        if len(paths) > 1 or await self._is_whole(paths[0]):
            await self._trim(paths[0])
        if self._by_operator:
            self.requested.set()

    async def _trim(self, path: Path) -> None:
        """Trim the log behind a checkpoint."""
        ledger = Ledger.load(checkpoint.read_checkpoint(path).ledger)
        await self._watch.refuse_if_fenced()
        await self._bus.trim(SAMPLES, ledger.first_kept)
        await self._bus.trim_parts(SAMPLES, keep=ledger.may_read)

    async def _try(self, snapshot: Snapshot, ledger: dict[str, Any]) -> Path:
        """Write a checkpoint under a hidden name, check that the run is still ours, and rename it.

        Raises:
            OSError: if the folder cannot be written; nothing is left behind.
            Fenced: if a newer learner holds the run.
        """
        await self._watch.refuse_if_fenced()
        stage = partial(
            checkpoint.stage_checkpoint,
            self._folder,
            self._training.backend,
            snapshot,
            ledger=ledger,
            epoch=self._watch.epoch,
            hf_max_gib=self._hf_max_gib,
        )
        work = await asyncio.to_thread(stage)
        try:
            await self._watch.refuse_if_fenced()
            return await asyncio.to_thread(
                checkpoint.commit_checkpoint, work, self._folder, ledger["version"]
            )
        except FileNotFoundError:
            # A newer learner deletes half-written folders: then this raises Fenced.
            await self._watch.refuse_if_fenced()
            raise
        finally:
            await asyncio.to_thread(checkpoint.discard_staged, work)
