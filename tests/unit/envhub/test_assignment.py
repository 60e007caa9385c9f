"""The training step that a ticket's group is expected in."""

from __future__ import annotations

import msgspec
import pytest

from broker.contract import wire
from broker.contract.examples import EXAMPLES
from envhub.tickets.assignment import assignment

TICKET = msgspec.structs.replace(EXAMPLES[wire.Ticket], max_staleness=2)


@pytest.mark.parametrize(
    ("number", "min_version", "step"),
    [
        (1, 0, 0),  # the first three steps' tickets are issued at once, four each
        (4, 0, 0),
        (5, 0, 1),
        (12, 0, 2),
        (13, 1, 3),
        (20, 1, 3),  # replacements raise the number
        (33, 9, 9),  # groups_per_step was larger before
    ],
)
def test_the_number_says_the_step_within_the_staleness_bound(
    number: int, min_version: int, step: int
) -> None:
    asked = assignment(msgspec.structs.replace(TICKET, number=number, min_version=min_version))
    assert asked.step(groups_per_step=4) == step


def test_an_evaluation_and_an_unknown_size_have_none() -> None:
    assert assignment(EXAMPLES[wire.EvalTicket]).step(groups_per_step=4) == -1
    assert assignment(TICKET).step(groups_per_step=0) == -1
