"""The process of a rank above 0: ``python -m learner.backends.ranks.follower FD``.

FD is its end of a socket to rank 0.
"""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from broker.errors import UserError
from broker.settings.registry import resolve
from broker.system import logs
from learner.backends.ranks.link import LinkClosedError, RankLink, SocketFrames
from learner.backends.ranks.messages import (
    BuildCommand,
    DoneReply,
    EndCommand,
    FoldersCommand,
    ReleaseCommand,
    Reply,
)
from learner.backends.ranks.rendezvous import GroupFailedError, Meeting

if TYPE_CHECKING:
    from learner.backends.worker import RankWorker

log = logging.getLogger(__name__)

# If rank 0 fails for the same reason, it ends within this time, and its message is enough.
_FAREWELL_S: Final = 5.0


def main(descriptor: int) -> int:
    """Serve until rank 0 closes the socket.

    Rank 0 reports lost ranks and wrong settings, in one line for all ranks.
    """
    logs.configure()
    link = RankLink(SocketFrames(socket.socket(fileno=descriptor)))
    try:
        serve_commands(link, lambda build: Meeting.in_file(build.store, build.size))
    except LinkClosedError:
        return 0
    except UserError as error:
        if link.closes(_FAREWELL_S):
            return 0
        log.error("%s", error)
        return 2
    except (GroupFailedError, RuntimeError):
        if not link.closes(_FAREWELL_S):
            raise
    finally:
        link.close()
    return 0


def serve_commands(
    link: RankLink,
    meet: Callable[[BuildCommand], Meeting],
    compare: Callable[[FoldersCommand], Reply] | None = None,
) -> EndCommand:
    """Execute commands until the last one, and return that.

    Args:
        meet: returns where the ranks of a group meet.
        compare: compares model folders with rank 0's.

    Raises:
        LinkClosedError: if rank 0 has closed the connection.
    """
    worker: RankWorker | None = None
    try:
        while True:
            command = link.receive_command()
            reply: Reply | None = None
            match command:
                case EndCommand():
                    return command
                case BuildCommand():
                    worker = _build_worker(command, meet(command))
                case ReleaseCommand():
                    if worker is not None:
                        worker.part()
                    worker = None
                    reply = DoneReply()
                case FoldersCommand():
                    if compare is None:
                        raise TypeError("FoldersCommand: rank 0 is on this host")
                    reply = compare(command)
                case _:
                    if worker is None:
                        raise TypeError(
                            f"first command: expected BuildCommand, got {type(command).__name__}"
                        )
                    reply = worker.obey(command, link.send)
            if reply is not None:
                link.send(reply)
    except LinkClosedError:
        if worker is not None:
            worker.part()
        raise


def _build_worker(build: BuildCommand, meeting: Meeting) -> RankWorker:
    logs.identify(role="learner", process_id=f"rank-{build.rank}")
    worker: RankWorker = resolve("backends", build.backend, {}).follow(build, meeting)
    return worker


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
