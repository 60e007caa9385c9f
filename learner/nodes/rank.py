"""A rank above 0 of a learner over several nodes: finds rank 0, joins and executes its commands.

``python -m learner.nodes.rank FD`` reads a ``RankStart`` from a descriptor; under torchrun and srun
the process of ``rlearner start`` calls ``serve_rank`` itself.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final

import msgspec
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from broker.errors import TransferFailed, UserError
from broker.system import logs
from broker.system.connections import address_towards
from broker.system.entry import EXIT_FAULT, EXIT_STOPPED, EXIT_USER_ERROR
from broker.weights.rendezvous.board_client import BoardClient, KeyPair, RendezvousAddress
from learner.backends.ranks.follower import serve_commands
from learner.backends.ranks.leader import exit_at_once
from learner.backends.ranks.link import LinkClosedError, RankLink
from learner.backends.ranks.messages import BuildCommand
from learner.backends.ranks.rendezvous import Meeting
from learner.nodes.encrypted_link import OTHER_RANKS, RANK_0, EncryptedFrames, LinkWatch
from learner.nodes.hello import make_hello
from learner.nodes.key import APPEARS_S, NodeKey, read_key
from learner.nodes.local_ranks import FORWARDED_SIGNAL, RankStart
from learner.nodes.meeting_keys import ARRIVALS, Farewell, answer_key, arrival_line, farewell_key
from learner.nodes.model_folders import compare_folders

log = logging.getLogger(__name__)

# Longest wait for a reply of rank 0.
ANSWER_S: Final = 10.0
AGAIN_S: Final = 1.0
REMIND_S: Final = 15.0
# After rank 0's end, this rank ends by itself within this time, unless it hangs in a collective.
FAREWELL_S: Final = 3.0


class NoRendezvousError(Exception):
    """Rank 0 did not appear in time."""


def main(descriptor: int) -> int:
    """Serve as a child of its node's process."""
    logs.configure()
    with os.fdopen(descriptor, "rb") as file:
        start = msgspec.msgpack.decode(file.read(), type=RankStart)
    return serve_rank(start)


def serve_rank(start: RankStart) -> int:
    """Serve until rank 0 ends the run; return the exit code."""
    logs.identify(role="learner", process_id=f"node-{start.node}-{start.local_rank}")
    rank = JoiningRank(start)
    with _handle_signals(rank):
        return rank.run()


class JoiningRank:
    """This process on its way to rank 0, and then one of its ranks."""

    def __init__(self, start: RankStart) -> None:
        self.start = start
        self.joined = False
        self._finished = threading.Event()
        self._close: Callable[[], None] = lambda: None
        self._where = RendezvousAddress(start.host, start.port, "").where

    def run(self) -> int:
        """Return the exit code."""
        try:
            key = read_key(
                Path(self.start.key_file), make=False, wait_s=min(APPEARS_S, self.start.deadline_s)
            )
            client = self._reach(key)
        except NoRendezvousError as error:
            log.error("%s", error)
            return EXIT_FAULT
        except UserError as error:
            log.error("%s", error)
            return EXIT_USER_ERROR
        try:
            return self._serve(client, key)
        except UserError as error:
            return self._fail(client, str(error), EXIT_USER_ERROR)
        except NoRendezvousError as error:
            log.error("%s", error)
            return EXIT_FAULT
        except TransferFailed as error:
            return self._fail(client, f"this rank cannot send weights: {error}", EXIT_FAULT)
        except LinkClosedError:
            log.error(
                "the connection to rank 0 at %s has ended; so does this rank, to be started again",
                self._where,
            )
            return EXIT_FAULT
        except Exception as error:
            # Whatever it is: rank 0's log must say why the run ended.
            log.exception("%s: %s", type(error).__name__, error)
            return self._fail(
                client,
                f"{type(error).__name__}: {' '.join(str(error).split())}",
                EXIT_FAULT,
                say=False,
            )
        finally:
            self._finished.set()
            self._close()
            client.close()

    def _reach(self, key: NodeKey) -> BoardClient:
        """Return a connection to rank 0's rendezvous, for which this waits.

        Raises:
            NoRendezvousError: if there is none in time.
            UserError: if something else listens there, or its key is another one.
        """
        start = self.start
        address = RendezvousAddress(start.host, start.port, key.curve_public(RANK_0))
        own = KeyPair(key.curve_public(OTHER_RANKS), key.curve_secret(OTHER_RANKS))
        deadline = time.monotonic() + start.deadline_s
        remind_at = 0.0
        while True:
            reason = _connection_problem(start.host, start.port)
            if not reason:
                try:
                    return BoardClient(address, own, ANSWER_S)
                except TransferFailed:
                    if not _connection_problem(start.host, start.port):
                        raise UserError(
                            f"{self._where} does not know the key {start.key_file} of node "
                            f"{start.node}: copy that of node 0 here, or name the port of node 0's "
                            "rendezvous"
                        ) from None
            if time.monotonic() > deadline:
                raise NoRendezvousError(
                    f"no rank 0 at {self._where} within {start.deadline_s:g} s: {reason}"
                )
            if time.monotonic() >= remind_at:
                remind_at = time.monotonic() + REMIND_S
                log.info(
                    "node %d waits for rank 0 at %s: %s",
                    start.node,
                    self._where,
                    reason or "no answer",
                )
            time.sleep(AGAIN_S)

    def _serve(self, client: BoardClient, key: NodeKey) -> int:
        start = self.start
        token = secrets.token_hex(8)
        client.append(ARRIVALS, arrival_line(start.node, start.local_rank, token))
        port = client.wait_for(answer_key(token), ANSWER_S)
        if port is None:
            raise NoRendezvousError(
                f"rank 0 at {self._where} lets nobody in any more: it has all its ranks, or ends"
            )
        frames = EncryptedFrames.connect(start.host, int(port), key)
        watch = LinkWatch(self._on_lost)
        link = RankLink(frames)
        watch.add(frames, frames.monitor())

        def close() -> None:
            watch.close()
            link.close()

        # Called at the end only, once rank 0 knows why.
        self._close = close
        hello = make_hello(
            start.node, start.local_rank, start.size_here, start.config, start.shared
        )
        link.send(hello)
        self.joined = True
        log.info(
            "rank %d of node %d has reached rank 0 at %s", start.local_rank, start.node, self._where
        )
        address = address_towards(start.host)

        def meet(build: BuildCommand) -> Meeting:
            return Meeting(PrefixStore(build.store, client), address)

        end = serve_commands(link, meet, partial(compare_folders, node=hello.name))
        if end.reason:
            log.error("%s", end.reason)
        return end.code

    def _on_lost(self, _: EncryptedFrames) -> None:
        if not self._finished.wait(FAREWELL_S):
            exit_at_once(
                f"rank 0 at {self._where} is gone; so does this rank, to be started again",
                EXIT_FAULT,
            )

    def _fail(self, client: BoardClient, line: str, code: int, *, say: bool = True) -> int:
        """Leave rank 0 the reason, so that its log has the line too."""
        if say:
            log.error("%s", line)
        self._finished.set()
        with suppress(RuntimeError):
            seat = farewell_key(self.start.node, self.start.local_rank)
            client.set(seat, msgspec.json.encode(Farewell(line[:2000], code)))
        return code


def _connection_problem(host: str, port: int) -> str:
    """Return why nothing can be reached at an address, empty if something listens there."""
    try:
        socket.create_connection((host, port), timeout=ANSWER_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


@contextmanager
def _handle_signals(rank: JoiningRank) -> Iterator[None]:
    """Before joining, end at the first signal; after it, wait for rank 0, or end at the second.

    Slurm and systemd signal every process of a node, and the process that started this one forwards
    the same signal, which does not count as a second one.
    """
    received: list[int] = []

    def handle(number: int, _: FrameType | None) -> None:
        if not rank.joined or (number in received and number != FORWARDED_SIGNAL):
            os._exit(EXIT_STOPPED)
        received.append(number)
        if len(received) == 1:
            os.write(
                2, f"{signal.Signals(number).name}: this rank ends when rank 0 does\n".encode()
            )

    handled = (signal.SIGINT, signal.SIGTERM, FORWARDED_SIGNAL)
    handlers: dict[signal.Signals, Any] = {
        forwarded: signal.signal(forwarded, handle) for forwarded in handled
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
