"""The ranks of all nodes, as rank 0 commands them once all are there."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from broker.errors import UserError
from broker.weights.rendezvous.board_server import BoardServer
from learner.backends.ranks.leader import EXIT_RANK_DIED, exit_at_once
from learner.backends.ranks.link import LinkClosedError, RankLink
from learner.backends.ranks.messages import (
    BackendArguments,
    BuildCommand,
    EndCommand,
    FoldersCommand,
    FoldersReply,
    ReleaseCommand,
)
from learner.backends.ranks.rendezvous import Meeting
from learner.nodes.encrypted_link import EncryptedFrames, LinkWatch
from learner.nodes.hello import Hello
from learner.nodes.meeting_keys import Farewell, farewell_key
from learner.nodes.model_folders import list_folder

log = logging.getLogger(__name__)

STORE_S: Final = 600.0
# Time for ranks to end by the last command, before children are killed.
LEAVE_S: Final = 10.0


@dataclass(frozen=True)
class RemoteRank:
    """A rank that is there."""

    hello: Hello
    link: RankLink
    frames: EncryptedFrames


class NodeRanks:
    """Ranks 1 … size - 1 of all nodes, see ``learner.backends.ranks.leader.OtherRanks``.

    Args:
        address: on which this host meets the others.
        num_here: ranks of this node, rank 0 included.
        ranks: in order.
        children: those that this process has started.
        watch: of their connections; it calls ``lose``.
    """

    def __init__(
        self,
        server: BoardServer,
        address: str,
        num_here: int,
        ranks: Sequence[RemoteRank],
        children: Sequence[subprocess.Popen[bytes]],
        watch: LinkWatch,
    ) -> None:
        self.num_here = num_here
        self.died = ""
        self.links = [rank.link for rank in ranks]
        self._server = server
        self._address = address
        self._ranks = ranks
        self._children = children
        self._store = server.store(STORE_S)
        self._num_built = 0
        self._ending = threading.Event()
        self._watch = watch

    @property
    def shared(self) -> list[str]:
        """Names of the devices of all other ranks' nodes on which the learner takes turns."""
        return sorted({name for rank in self._ranks for name in rank.hello.shared})

    def lose(self, frames: EncryptedFrames) -> None:
        """End this process because a rank has ended, unless all are to end."""
        if self._ending.is_set():
            return
        rank, hello = next(
            (number, remote.hello)
            for number, remote in enumerate(self._ranks, 1)
            if remote.frames is frames
        )
        # A rank that ends by itself has left the reason there before.
        message = self._store.peek(farewell_key(*hello.seat))
        if message is None:
            self.died = (
                f"rank {rank} of {hello.name} is gone; "
                "all nodes end, to resume from the last checkpoint"
            )
            code = EXIT_RANK_DIED
        else:
            farewell = msgspec.json.decode(message, type=Farewell)
            self.died = f"rank {rank} of {hello.name}: {farewell.line}"
            code = farewell.code
        exit_at_once(self.died, code)

    def meeting(self) -> Meeting:
        return Meeting(PrefixStore(self._name, self._store), self._address)

    @property
    def _name(self) -> str:
        # Each group that is built meets under a name of its own in the same store.
        return f"group-{self._num_built}"

    def build(self, backend: str, settings: BackendArguments) -> None:
        self._num_built += 1
        self._compare_folders(
            {str(settings[key]) for key in ("model_path", "ref_path") if settings.get(key)}
        )
        sizes = {rank.hello.node: rank.hello.local_size for rank in self._ranks}
        for number, rank in enumerate(self._ranks, 1):
            rank.link.send(
                BuildCommand(
                    backend,
                    number,
                    len(self._ranks) + 1,
                    store=self._name,
                    settings=settings,
                    local_rank=rank.hello.local_rank,
                    num_here=sizes[rank.hello.node],
                )
            )

    def _compare_folders(self, paths: set[str]) -> None:
        folders = {path: list_folder(Path(path)) for path in sorted(paths) if os.path.isdir(path)}
        if not folders:
            return
        for link in self.links:
            link.send(FoldersCommand(folders))
        problem = ""
        for link in self.links:
            reply = link.receive_reply()
            if not isinstance(reply, FoldersReply):
                raise TypeError(f"expected FoldersReply, got {type(reply).__name__}")
            problem = problem or reply.problem
        if problem:
            raise UserError(problem)

    def arm(self) -> None:
        """Do nothing: from the start this process exits when a rank ends."""

    def close(self) -> None:
        """Have the ranks drop the backend; they wait for another one."""
        # All get the command before any reply is awaited, so that they leave the group together.
        for link in self.links:
            with suppress(LinkClosedError):
                link.send(ReleaseCommand())
        for link in self.links:
            with suppress(LinkClosedError):
                link.receive_reply()

    def end(self, code: int, reason: str = "") -> None:
        """End all ranks with this code, and close everything."""
        self._ending.set()
        for link in self.links:
            with suppress(LinkClosedError):
                link.send(EndCommand(code, reason))
        deadline = time.monotonic() + LEAVE_S
        for rank in self._ranks:
            rank.frames.lost.wait(max(0.0, deadline - time.monotonic()))
        for child in self._children:
            try:
                child.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        self._watch.close()
        for link in self.links:
            link.close()
        self._server.close()
