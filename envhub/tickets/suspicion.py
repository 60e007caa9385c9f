"""Decides whether a ticket may have killed its hubs, from its deliveries and their exits. Pure.

A ticket that may have killed two processes is played once more, by a hub that plays nothing else.
If that hub dies too, the ticket is poisonous. Tickets that shared a hub with it become suspect as
well, are played alone, and end well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from broker.contract.wire import Attempt

SUSPECT_AFTER: Final = 2  # deaths


@dataclass(frozen=True)
class TicketJudgement:
    """How to treat a delivery.

    Attributes:
        deaths: processes that may have died of the ticket.
        poisonous: whether it must not be played.
    """

    deaths: int
    poisonous: bool = False

    @property
    def alone(self) -> bool:
        """Whether it must be played while the hub plays nothing else."""
        return self.deaths >= SUSPECT_AFTER


def judge(num_delivered: int, past: Attempt | None, *, died: bool) -> TicketJudgement:
    """Judge a delivery.

    A first delivery leaves no note, because nearly all tickets have only one. So the first of
    several counts as a death unless its hub noted that it handed the ticket back. At worst a
    harmless ticket is played alone; only a death that was noted makes it poisonous.

    Args:
        num_delivered: how often the ticket has been delivered, including this time.
        past: the note of the previous hubs.
        died: whether the process that ``past`` names has ended.
    """
    if past is None:
        return TicketJudgement(min(num_delivered - 1, 1))
    if not died:
        return TicketJudgement(past.deaths)
    return TicketJudgement(past.deaths + 1, poisonous=past.alone)
