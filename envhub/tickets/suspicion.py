"""Whether a ticket may have killed the hubs that played it: decided from its deliveries and from who died. Pure.

A ticket that may have killed two processes is played once more, by a hub that plays nothing else. If that hub dies too,
the ticket is poisonous. The tickets that shared a hub with it become suspect as well; each of them is played alone,
ends well and is kept.
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
        poisonous: it must not be played; else play it.
    """

    deaths: int
    poisonous: bool = False

    @property
    def alone(self) -> bool:
        """Whether it must be played while the hub does nothing else."""
        return self.deaths >= SUSPECT_AFTER


def judge(num_delivered: int, past: Attempt | None, *, died: bool) -> TicketJudgement:
    """Judge a delivery.

    A first delivery leaves no note, because nearly all tickets have only one. So the first of several counts as a death
    unless the hub that had it noted that it handed it back. At worst a harmless ticket is played alone; only a death
    that was noted makes it poisonous.

    Args:
        num_delivered: how often the ticket has been delivered, this time included.
        past: what the hubs before have noted.
        died: the process that ``past`` names has ended.
    """
    if past is None:
        return TicketJudgement(min(num_delivered - 1, 1))
    if not died:
        return TicketJudgement(past.deaths)
    return TicketJudgement(past.deaths + 1, poisonous=past.alone)
