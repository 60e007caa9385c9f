"""A receiver's access to snapshots: finds the newest and reads its bytes into a buffer."""

from __future__ import annotations

from functools import partial

from broker.errors import TransferFailed
from broker.weights.group import WaitMonitor
from broker.weights.receiver.buffers import IncomingVersion
from broker.weights.snapshots.snapshot import SnapshotManifest
from broker.weights.snapshots.snapshot_source import SnapshotSource
from broker.weights.threads import in_thread, patiently


class SnapshotPoller:
    """One source, polled by a server of one run."""

    def __init__(self, source: SnapshotSource, run: str) -> None:
        self._source = source
        self._run = run
        self.where = source.where

    async def newest(self) -> SnapshotManifest | None:
        """Return the newest snapshot's manifest, None without one.

        Raises:
            TransferFailed: if it cannot be read, or is of another run.
        """
        manifest = await in_thread(self._source.newest, "weights-look")
        if manifest is not None and manifest.run != self._run:
            raise TransferFailed(
                f"snapshot {self.where}: expected run {self._run}, found run {manifest.run}"
            )
        return manifest

    async def read(
        self, manifest: SnapshotManifest, arrival: IncomingVersion, watch: WaitMonitor
    ) -> None:
        """Read its bytes into host memory and check their digest.

        Raises:
            TransferFailed: if they cannot be read, or are wrong.
        """
        fill = partial(self._source.fill, manifest, arrival.flat, watch)
        await patiently(in_thread(fill, "weights-read"), watch, self._source.timeout_s)
