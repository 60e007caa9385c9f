"""One rank's part of a checkpoint in host memory, and all ranks' parts as rank 0 sees them."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from broker.errors import UserError
from learner.backends.parts.part_file import PartFile, part_name
from learner.backends.parts.slices import Slice
from learner.backends.parts.writing import write_part
from learner.backends.ranks.group import RankGroup
from learner.backends.ranks.link import LinkClosedError
from learner.backends.ranks.messages import DropCommand, Reply, WriteCommand, WrittenReply


class StagedPart:
    """Copies of a rank's slices, which training does not change."""

    def __init__(self, slices: Sequence[Slice], rank: int, size: int) -> None:
        self._slices = slices
        self._rank = rank
        self._size = size

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(piece.tensor.nbytes for piece in self._slices)

    def write(self, folder: str | Path) -> PartFile:
        """Write and sync this rank's file; from any thread.

        Raises:
            UserError: if the folder that rank 0 made does not exist here.
            OSError: if the file cannot be written.
        """
        if not Path(folder).is_dir():
            host = socket.gethostname()
            raise UserError(
                f"rank {self._rank} on {host} does not see {folder}, which rank 0 has made; "
                "run.dir must be in a file system that all nodes share"
            )
        return write_part(Path(folder) / part_name(self._rank, self._size), self._slices)

    def write_in_thread(self, folder: str, send: Callable[[Reply], None]) -> None:
        """Write while this rank trains, and report it."""

        def work() -> None:
            # Rank 0 may have ended; then so will this process.
            with suppress(LinkClosedError):
                send(self.report(folder))

        threading.Thread(target=work, name="write-checkpoint", daemon=True).start()

    def report(self, folder: str) -> WrittenReply:
        """Write; return the file, or why there is none."""
        try:
            return WrittenReply(self.write(folder))
        except OSError as error:
            return WrittenReply(
                None, error.errno or errno.EIO, f"rank {self._rank}: {error.strerror or error}"
            )
        except UserError as error:
            return WrittenReply(None, 0, str(error))


class RankSnapshot:
    """See ``learner.backends.base.Snapshot``; each rank's part is in its own process."""

    def __init__(self, own: StagedPart, ranks: RankGroup) -> None:
        self._own = own
        self._ranks = ranks

    def write(self, folder: Path) -> list[PartFile]:
        """See ``learner.backends.base.Snapshot``."""
        leader = self._ranks.leader
        if leader is None:
            return [self._own.write(folder)]
        with leader.working():
            leader.send_to_all(WriteCommand(str(folder)))
            replies = [self._own.report(str(folder)), *leader.receive_written()]
        for reply in replies:
            if reply.part is None:
                if reply.errno:
                    raise OSError(reply.errno, reply.problem)
                raise UserError(reply.problem)
        return [reply.part for reply in replies if reply.part is not None]

    def drop(self) -> None:
        """See ``learner.backends.base.Snapshot``."""
        self._own = StagedPart([], 0, 1)
        if (leader := self._ranks.leader) is not None:
            # A rank may have ended; then so will this process.
            with suppress(LinkClosedError):
                leader.send_to_all(DropCommand())
