"""When tickets expire, under any interleaving of time, pauses, fleets that come and go, renamed domains and changed
rules.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from learner.credit.ledger import (
    Action,
    ForgetTicket,
    GroupArrival,
    IssueTicket,
    Ledger,
    Record,
    RulesUpdate,
    TicketEnd,
)
from learner.credit.ticket_rules import DomainRule, TicketRules
from learner.credit.tickets import TicketAges

TIMEOUT_S = 10.0
NAMES = ["a", "b", "c"]


def rules(names: set[str], groups: int, staleness: int) -> TicketRules:
    domains = tuple(DomainRule(name, 1.0, 2, 2, 9.0) for name in sorted(names))
    return TicketRules(
        steps=1000, groups_per_step=groups, max_staleness=staleness, on_late="wait", seed=0, domains=domains
    )


class Patience(RuleBasedStateMachine):
    """A ledger whose tickets age; each is also followed by a clock of its own that only runs while a hub could work on
    it.
    """

    @initialize(
        names=st.sets(st.sampled_from(NAMES), min_size=1), groups=st.integers(1, 3), staleness=st.integers(0, 2)
    )
    def start(self, names: set[str], groups: int, staleness: int) -> None:
        self.ledger, self.ages = Ledger(rules(names, groups, staleness)), TicketAges(TIMEOUT_S)
        self.records = self.epoch = 0
        self.paused, self.served = False, set[str]()
        self.queues: dict[str, list[int]] = {name: [] for name in NAMES}  # not delivered yet
        self.delivered: dict[str, int] = {}
        self.worked_s: dict[int, float] = {}  # ticket -> seconds in which a hub had it, or could have had it again
        self.perform(self.ledger.open_credit())

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, IssueTicket):
                self.queues[action.ticket.domain].append(action.ticket.number)
            elif isinstance(action, ForgetTicket):
                self.worked_s.pop(action.number, None)

    def put(self, record: Record) -> None:
        self.records += 1
        self.perform(self.ledger.apply(record, self.records))
        while self.ledger.full:
            self.perform(self.ledger.complete_step())

    # ---- events
    @rule()
    def pause_or_resume(self) -> None:
        self.paused = not self.paused

    @rule(name=st.sampled_from(NAMES))
    def a_hub_comes_or_the_last_one_goes(self, name: str) -> None:
        self.served ^= {name}

    @precondition(lambda self: not self.paused and any(self.queues[name] for name in self.served))
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(name for name in self.served if self.queues[name])))
        number = self.queues[name].pop(0)
        self.delivered[name] = number
        if number in self.ledger.waiting_for:
            self.worked_s[number] = 0.0

    @precondition(lambda self: self.worked_s)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.worked_s)))
        self.put(GroupArrival(number, self.ledger.state.version, (0.0, 1.0)))
        self.worked_s.pop(number, None)

    @rule(names=st.sets(st.sampled_from(NAMES), min_size=1), groups=st.integers(1, 3), staleness=st.integers(0, 2))
    def start_again_with_other_rules(self, names: set[str], groups: int, staleness: int) -> None:
        """The new learner knows no ages: its tickets age from the beginning."""
        self.epoch += 1
        self.ages = TicketAges(TIMEOUT_S)
        self.worked_s = dict.fromkeys(self.worked_s, 0.0)
        self.put(RulesUpdate(rules(names, groups, staleness), self.epoch))

    @rule(elapsed_s=st.sampled_from([4.0, 6.0, 1000.0]))
    def time_passes(self, elapsed_s: float) -> None:
        waiting = {number: self.ledger.ticket(number).domain for number in self.ledger.waiting_for}
        late = []
        for number in self.worked_s:
            if not self.paused and waiting[number] in self.served:
                before, self.worked_s[number] = self.worked_s[number], self.worked_s[number] + elapsed_s
                if before < TIMEOUT_S <= self.worked_s[number]:
                    late.append(number)
        assert self.ages.passed(elapsed_s, waiting, self.delivered, self.served, paused=self.paused) == sorted(late)
        for number in late:
            self.put(TicketEnd(number, "timeout"))

    @invariant()
    def only_open_tickets_age(self) -> None:
        assert set(self.worked_s) <= self.ledger.waiting_for


TestPatience = Patience.TestCase
TestPatience.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
