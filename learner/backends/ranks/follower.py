"""The process of a rank above 0: ``python -m learner.backends.ranks.follower FD``, its end of a socket."""

from __future__ import annotations

import logging
import socket
import sys
from typing import TYPE_CHECKING, Final

from broker.errors import UserError
from broker.settings.registry import resolve
from broker.system import logs
from learner.backends.ranks.link import LinkClosedError, RankLink
from learner.backends.ranks.messages import BuildCommand

if TYPE_CHECKING:
    from learner.backends.worker import RankWorker

log = logging.getLogger(__name__)

_FAREWELL_S: Final = 5.0  # in which rank 0 ends, too, if it fails for the same reason


def main(descriptor: int) -> int:
    """Serve until rank 0 closes the socket; rank 0 reports lost peers and wrong settings, in one line for all ranks."""
    logs.configure()
    link = RankLink(socket.socket(fileno=descriptor))
    try:
        _serve(link)
    except LinkClosedError:
        return 0
    except UserError as error:
        if link.closes(_FAREWELL_S):
            return 0
        log.error("%s", error)
        return 2
    except RuntimeError:
        if not link.closes(_FAREWELL_S):
            raise
    finally:
        link.close()
    return 0


def _serve(link: RankLink) -> None:
    build = link.command()
    if not isinstance(build, BuildCommand):
        raise TypeError(f"first command: expected BuildCommand, got {type(build).__name__}")
    logs.identify(role="learner", process_id=f"rank-{build.rank}")
    worker: RankWorker = resolve("backends", build.backend, {}).follow(build)
    try:
        while True:
            if (reply := worker.obey(link.command(), link.send)) is not None:
                link.send(reply)
    except LinkClosedError:
        worker.part()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
