"""Writes the learner's snapshots, every n-th version and the last, in the background of training."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from broker.contract import wire
from broker.weights.memory.staging import FlatBuffer
from broker.weights.snapshots import snapshot
from broker.weights.threads import in_thread, spawn

if TYPE_CHECKING:
    from broker.weights.memory.staging import StagingBuffers

log = logging.getLogger(__name__)

CLOSE_S: Final = 60.0  # for the last one


class SnapshotPublisher:
    """Copies a version out of staging and writes the copy, which takes as much memory as the model.

    Args:
        folder: of the run's snapshots.
        every: versions divisible by it are written, and the first that is offered.
    """

    def __init__(self, folder: Path, run: str, every: int) -> None:
        self._folder = folder
        self._run = run
        self._every = every
        self._copy: FlatBuffer | None = None
        self._owed = True  # write the next version whatever its number
        self._task: asyncio.Task[None] | None = None
        self._last: tuple[StagingBuffers, wire.WeightsOffer] | None = None  # offered
        self._written = -1
        self._values: dict[str, float] = {}

    def offered(self, staging: StagingBuffers, offer: wire.WeightsOffer) -> None:
        """Note that a version with a known digest is on offer; return at once."""
        self._last = (staging, offer)
        if (self._owed or offer.version % self._every == 0) and (
            self._task is None or self._task.done()
        ):
            self._owed = False
            self._task = spawn(self._write(staging, offer))

    def metrics(self) -> dict[str, float]:
        """Return weights/snapshot_{version,seconds}: the newest on disk, and how long writing took."""
        return dict(self._values)

    async def close(self) -> None:
        """Write the version offered last, unless it is written."""
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=CLOSE_S)
        if self._last is not None and self._last[1].version != self._written:
            await asyncio.wait({asyncio.ensure_future(self._write(*self._last))}, timeout=CLOSE_S)

    async def _write(self, staging: StagingBuffers, offer: wire.WeightsOffer) -> None:
        plan = staging.plan
        start = time.monotonic()
        into = self._copy = self._copy or FlatBuffer(plan)
        try:
            if not await in_thread(
                lambda: staging.copy_out(offer.version, into), "weights-snapshot"
            ):
                self._owed = True  # it was overwritten
                return
            write = partial(
                snapshot.write, self._folder, self._run, offer, plan=plan, buffer=into.buffer
            )
            if await in_thread(write, "weights-snapshot"):
                self._written = offer.version
                self._values = {
                    "weights/snapshot_version": float(offer.version),
                    "weights/snapshot_seconds": time.monotonic() - start,
                }
        except OSError as error:
            self._owed = True
            log.error(
                "weights: version %d could not be written as a snapshot: %s", offer.version, error
            )
