"""Rank 0's side: sends commands to the other ranks, and exits when one of them does."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

from broker.errors import RlearnerError
from learner.backends.ranks.link import LinkClosedError, RankLink
from learner.backends.ranks.messages import BackendArguments, Reply, WrittenReply
from learner.backends.ranks.rendezvous import GroupFailedError, Meeting

log = logging.getLogger(__name__)

# A supervisor restarts the learner after it.
EXIT_RANK_DIED: Final = 1


class RankExitedError(RlearnerError):
    """Another rank ended."""


def exit_at_once(line: str, code: int = EXIT_RANK_DIED) -> None:
    """Exit at once, as if killed; everything that must last is on disk or in the broker."""
    # Cleaning up would hang: other threads wait in collectives for the rank that is gone.
    log.critical("%s", line)
    logging.shutdown()
    os._exit(code)


class OtherRanks(Protocol):
    """Ranks 1 … size - 1: where they are and how rank 0 reaches them.

    Attributes:
        links: to each of them, in order.
        num_here: ranks on rank 0's host, rank 0 included.
        died: one line about a rank that ended by itself, else empty.
    """

    links: list[RankLink]
    num_here: int
    died: str

    def meeting(self) -> Meeting:
        """Return where they meet for the process group."""
        ...

    def build(self, backend: str, settings: BackendArguments) -> None:
        """Have them build the backend ("module:attribute") from its arguments and join.

        Raises:
            UserError: if one of them cannot, for lack of files.
        """
        ...

    def arm(self) -> None:
        """From now on exit when a rank ends.

        Before, rank 0 fails by itself for the same reason, and reports it better.

        Raises:
            RankExitedError: if one has ended already.
        """
        ...

    def close(self) -> None:
        """Have them leave."""
        ...


class RankLeader:
    """Rank 0's connections to the ranks that execute its commands."""

    def __init__(self, ranks: OtherRanks) -> None:
        self.ranks = ranks

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around work with other ranks, turn torch's errors about a lost peer into one line.

        Raises:
            RankExitedError: if a rank ended; by default this process exits first.
        """
        try:
            yield
        except (LinkClosedError, GroupFailedError, RuntimeError) as error:
            # torch reports a lost peer as any RuntimeError, often before its end is noticed.
            self._wait_for_news(1.0)
            if self.ranks.died or isinstance(error, LinkClosedError):
                raise RankExitedError(self.ranks.died or "a rank closed its connection") from None
            raise

    def _wait_for_news(self, seconds: float) -> None:
        for _ in range(20):
            if self.ranks.died:
                return
            time.sleep(seconds / 20)

    def send_to_all(self, message: Any) -> None:
        """Send a message to all ranks."""
        for link in self.ranks.links:
            link.send(message)

    def send_to(self, rank: int, message: Any) -> None:
        """Send a message to one rank."""
        self.ranks.links[rank - 1].send(message)

    def receive_replies(self) -> list[Reply]:
        """Receive a reply from each rank, in order."""
        return [link.receive_reply() for link in self.ranks.links]

    def receive_written(self) -> list[WrittenReply]:
        """Receive what each rank wrote, in order."""
        return [link.receive_written() for link in self.ranks.links]

    def close(self) -> None:
        """Have the other ranks leave."""
        self.ranks.close()
