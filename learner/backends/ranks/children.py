"""The other ranks of a learner on one host: children of rank 0, each with a private socket."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Final

from broker.system.children import spawn
from learner.backends.ranks.leader import RankExitedError, exit_at_once
from learner.backends.ranks.link import RankLink, SocketFrames
from learner.backends.ranks.messages import BackendArguments, BuildCommand
from learner.backends.ranks.rendezvous import Meeting

# Time for the other ranks to leave the process group and free their GPUs.
_LEAVE_S: Final = 10.0


class ChildRanks:
    """Ranks 1 … size - 1, see ``OtherRanks``; the constructor starts them."""

    def __init__(self, size: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="rlearner-ranks-"))
        self._size = size
        self._store = str(self._folder / "store")
        self._closing = self._armed = False
        self.died = ""
        self.num_here = size
        self.processes: list[subprocess.Popen[bytes]] = []
        self.links: list[RankLink] = []
        for rank in range(1, size):
            self._start(rank)

    def _start(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "learner.backends.ranks.follower", str(theirs.fileno())]
        try:
            # Their logs go where this process's go.
            with theirs, os.fdopen(os.dup(2), "wb") as output:
                process = spawn(command, output, pass_fds=[theirs.fileno()])
        except BaseException:
            ours.close()
            raise
        self.processes.append(process)
        self.links.append(RankLink(SocketFrames(ours)))
        # A thread for each child notices its end at once, without polling.
        threading.Thread(
            target=self._watch, args=(rank, process), name=f"rank-{rank}", daemon=True
        ).start()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if self._closing or self.died:
            return
        ending = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        self.died = (
            f"rank {rank} (pid {process.pid}) ended {ending}; "
            "so does the learner, to resume from its checkpoint"
        )
        if self._armed:
            exit_at_once(self.died)

    def meeting(self) -> Meeting:
        return Meeting.in_file(self._store, self._size)

    def build(self, backend: str, settings: BackendArguments) -> None:
        for rank, link in enumerate(self.links, 1):
            link.send(
                BuildCommand(
                    backend,
                    rank,
                    self._size,
                    store=self._store,
                    settings=settings,
                    local_rank=rank,
                    num_here=self._size,
                )
            )

    def arm(self) -> None:
        self._armed = True
        if self.died:
            exit_at_once(self.died)
            raise RankExitedError(self.died)

    def close(self) -> None:
        """Close the links and wait for the ranks to exit; kill them after ten seconds."""
        self._closing = True
        for link in self.links:
            link.close()
        deadline = time.monotonic() + _LEAVE_S
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
