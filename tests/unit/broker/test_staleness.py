"""The rule for what is late, which ledger, hubs, audit and simulation take from one function."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from broker.contract import wire
from broker.contract.examples import EXAMPLES
from broker.contract.staleness import due_step, is_late
from envhub.scheduling.line import GroupJob
from envhub.scheduling.slots import CloseTicket, EpisodeSlots
from envhub.tickets.assignment import assignment
from learner.credit.ledger import (
    ForgetTicket,
    GroupArrival,
    HoldGroup,
    IssueTicket,
    Ledger,
    LedgerState,
    TakeGroup,
)
from learner.credit.ledger_file import LedgerLine
from learner.credit.ticket_rules import DomainRule, TicketRules
from rlearner.audit.ledger_audit import check_staleness
from rlearner.audit.report import AuditReport

# (oldest version, version, max_staleness)
GRID = [
    (oldest, version, bound)
    for version, bound in itertools.product(range(7), range(5))
    for oldest in range(version + 1)
]
TICKET = EXAMPLES[wire.Ticket]
assert isinstance(TICKET, wire.Ticket)


@pytest.mark.parametrize(
    ("oldest", "version", "bound", "late"),
    [(3, 3, 0, False), (3, 4, 0, True), (3, 4, 1, False), (3, 5, 1, True), (0, 9, 9, False)],
)
def test_a_token_may_lag_by_the_bound(oldest: int, version: int, bound: int, late: bool) -> None:
    assert is_late(oldest, version, bound) is late


def ledger_drops(oldest: int, version: int, bound: int, on_late: str) -> bool:
    domain = DomainRule("lake", 1.0, group_size=2, min_group_size=2, deadline_s=9.0)
    rules = TicketRules(99, 1, bound, on_late, seed=0, domains=(domain,))  # type: ignore[arg-type]
    ledger = Ledger(LedgerState(rules, version=version))
    ledger.open_credit()
    end, new = ledger.apply(GroupArrival(1, oldest, (0.0, 1.0)), 1)
    if end == ForgetTicket(1, "dropped"):
        assert isinstance(new, IssueTicket)
        return True
    assert (end, new) == (HoldGroup(1), TakeGroup(1))
    return False


def slots_close(oldest: int, version: int, bound: int, *, sampled_first: bool) -> bool:
    slots = EpisodeSlots(1, max_retries=0)
    slots.offer(GroupJob("a", 1, 1, 9.0, max_staleness=bound), 0.0)
    actions = [] if sampled_first else slots.advanced(version)
    actions += slots.sampled("a", oldest)
    actions += slots.advanced(version) if sampled_first else []
    closings = [action.reason for action in actions if isinstance(action, CloseTicket)]
    assert closings in ([], ["late"])
    return bool(closings)


def audit_fails(oldest: int, version: int, bound: int) -> bool:
    report = AuditReport()
    line = LedgerLine(state="trained", ticket=1, step=version + 1)
    check_staleness(report, line, oldest, newest=version, bound=bound, source="it")
    return bool(report.problems)


def hub_expects_later(oldest: int, version: int, bound: int) -> bool:
    """Whether the last step that a hub may expect a ticket of version ``oldest`` in is before
    ``version``.
    """
    ticket = msgspec.structs.replace(TICKET, number=9999, min_version=oldest, max_staleness=bound)
    return assignment(ticket).step(groups_per_step=1) < version


@pytest.mark.parametrize(("oldest", "version", "bound"), GRID)
def test_ledger_slots_assignment_and_audit_agree(oldest: int, version: int, bound: int) -> None:
    late = is_late(oldest, version, bound)
    assert late is (version > due_step(oldest, bound))
    assert ledger_drops(oldest, version, bound, "drop") is late
    assert ledger_drops(oldest, version, bound, "wait") is late
    assert slots_close(oldest, version, bound, sampled_first=True) is late
    assert slots_close(oldest, version, bound, sampled_first=False) is late
    assert audit_fails(oldest, version, bound) is late
    assert hub_expects_later(oldest, version, bound) is late
