"""Rank 0's side: starts the other ranks, sends them commands, and exits when one of them does."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from broker.errors import RlearnerError
from broker.system.children import spawn
from learner.backends.ranks.link import LinkClosedError, RankLink
from learner.backends.ranks.messages import BuildCommand, Reply, WrittenReply

log = logging.getLogger(__name__)

EXIT_RANK_DIED: Final = 1  # a supervisor restarts the learner
_LEAVE_S: Final = 10.0


class RankExitedError(RlearnerError):
    """Another rank ended."""


def exit_at_once(line: str) -> None:
    """Exit at once, as if killed; everything that must last is on disk or in the broker."""
    log.critical("%s", line)
    logging.shutdown()
    os._exit(EXIT_RANK_DIED)


class RankLeader:
    """Ranks 1 … size - 1, started by the constructor.

    Args:
        backend: "module:attribute" of the backend that they build.
        settings: its arguments.
        on_death: called with one line, from a thread, when a rank ends by itself.

    Attributes:
        store: file of the rendezvous.
    """

    def __init__(
        self, backend: str, size: int, settings: dict[str, Any], *, on_death: Callable[[str], None] | None = None
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="rlearner-ranks-"))
        self.store = str(self._folder / "store")
        self._on_death = on_death or (lambda line: exit_at_once(line))
        self._closing = self._armed = False
        self.died = ""
        self.processes: list[subprocess.Popen[bytes]] = []
        self._links: list[RankLink] = []
        self._watchers: list[threading.Thread] = []
        for rank in range(1, size):
            self._start(rank)
            self._links[-1].send(BuildCommand(backend, rank, size, self.store, settings))

    def _start(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "learner.backends.ranks.follower", str(theirs.fileno())]
        with theirs, os.fdopen(os.dup(2), "wb") as output:  # their logs go where this process's go
            process = spawn(command, output, pass_fds=[theirs.fileno()])
        self.processes.append(process)
        self._links.append(RankLink(ours))
        watcher = threading.Thread(target=self._watch, args=(rank, process), name=f"rank-{rank}", daemon=True)
        watcher.start()
        self._watchers.append(watcher)

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if self._closing or self.died:
            return
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        self.died = f"rank {rank} (pid {process.pid}) ended {how}; so does the learner, to resume from its checkpoint"
        if self._armed:
            self._on_death(self.died)

    def arm(self) -> None:
        """From now on exit when a rank ends. Before, rank 0 fails by itself for the same reason and reports it better.

        Raises:
            RankExitedError: if one has ended already.
        """
        self._armed = True
        if self.died:
            self._on_death(self.died)
            raise RankExitedError(self.died)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around work with other ranks, turn torch's errors about a lost peer into one line.

        Raises:
            RankExitedError: if a rank ended; by default this process exits first.
        """
        try:
            yield
        except (LinkClosedError, RuntimeError) as error:
            self._wait_for_news(1.0)
            if self.died or isinstance(error, LinkClosedError):
                raise RankExitedError(self.died or "a rank closed its connection") from None
            raise

    def _wait_for_news(self, seconds: float) -> None:
        done = threading.Event()
        for _ in range(20):
            if self.died or done.wait(seconds / 20):
                return

    def tell(self, message: Any) -> None:
        """Send a message to all ranks."""
        for link in self._links:
            link.send(message)

    def tell_one(self, rank: int, message: Any) -> None:
        """Send a message to one rank."""
        self._links[rank - 1].send(message)

    def replies(self) -> list[Reply]:
        """Receive a reply from each rank, in order."""
        return [link.reply() for link in self._links]

    def written(self) -> list[WrittenReply]:
        """Receive what each rank wrote, in order."""
        return [link.written() for link in self._links]

    def close(self) -> None:
        """Close the links and wait for the ranks to exit; kill them after ten seconds."""
        self._closing = True
        for link in self._links:
            link.close()
        deadline = time.monotonic() + _LEAVE_S
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
