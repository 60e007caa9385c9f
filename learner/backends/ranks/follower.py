"""A rank that does as rank 0 says: ``python -m learner.backends.ranks.follower FD``, FD being its end of a socket."""

from __future__ import annotations

import logging
import socket
import sys
from typing import TYPE_CHECKING, Final

from broker.errors import UserError
from broker.settings.registry import resolve
from broker.system import logs
from learner.backends.ranks.link import Gone, Link
from learner.backends.ranks.messages import Build

if TYPE_CHECKING:
    from learner.backends.ddp import DdpBackend

log = logging.getLogger(__name__)

_FAREWELL_S: Final = 5.0  # in which rank 0 has ended, too, if what went wrong here is not this rank's alone


def main(descriptor: int) -> int:
    """Serve until rank 0 closes the socket.

    What torch says about a rank that was lost, and what is wrong with settings that all ranks have, is rank 0's to say, in one line.
    """
    logs.configure()
    link = Link(socket.socket(fileno=descriptor))
    try:
        _serve(link)
    except Gone:
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


def _serve(link: Link) -> None:
    build = link.command()
    if not isinstance(build, Build):
        raise TypeError(f"the first command was {type(build).__name__}")
    logs.identify(role="learner", process_id=f"rank-{build.rank}")
    backend: DdpBackend = resolve("backends", build.backend, {}).follow(build)
    try:
        while True:
            if (reply := backend.obey(link.command())) is not None:
                link.send(reply)
    except Gone:
        backend.part()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
