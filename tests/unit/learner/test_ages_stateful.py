"""When tickets expire, under any interleaving of time, pauses, hubs that come, go, freeze and hand
back, reward hubs that do the same, renamed domains and changed rules.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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
SCORED = {"b", "c"}  # domains whose groups a reward hub scores
SCORER = "scorer"


def rules(names: set[str], groups: int, staleness: int) -> TicketRules:
    domains = tuple(DomainRule(name, 1.0, 2, 2, 9.0) for name in sorted(names))
    return TicketRules(
        steps=1000,
        groups_per_step=groups,
        max_staleness=staleness,
        on_late="wait",
        seed=0,
        domains=domains,
    )


@dataclass
class Hub:
    """A process: what it works on, and for how long by its own clock, which stands while it is
    frozen.
    """

    # ticket -> seconds since it was first reported
    tickets: dict[int, float] = field(default_factory=dict)
    reported: set[int] = field(default_factory=set)
    is_frozen: bool = False


class Patience(RuleBasedStateMachine):
    """A ledger whose tickets age, and hubs with clocks of their own that run only while they work
    on a ticket.
    """

    @initialize(
        names=st.sets(st.sampled_from(NAMES), min_size=1),
        groups=st.integers(1, 3),
        staleness=st.integers(0, 2),
    )
    def start(self, names: set[str], groups: int, staleness: int) -> None:
        self.ledger, self.ages = Ledger(rules(names, groups, staleness)), TicketAges(TIMEOUT_S)
        self.records = self.epoch = 0
        self.paused = False
        self.queues: dict[str, list[int]] = {name: [] for name in NAMES}
        self.played: list[int] = []  # the reward queue
        self.hubs: dict[str, Hub] = {}
        self.expired: set[int] = set()
        self.perform(self.ledger.open_credit())

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, IssueTicket):
                self.queues[action.ticket.domain].append(action.ticket.number)
            elif isinstance(action, ForgetTicket):
                self.expired.discard(action.number)

    def put(self, record: Record) -> None:
        self.records += 1
        self.perform(self.ledger.apply(record, self.records))
        while self.ledger.full:
            self.perform(self.ledger.complete_step())

    @property
    def waiting(self) -> dict[int, str]:
        return {number: self.ledger.ticket(number).domain for number in self.ledger.waiting_for}

    @property
    def served(self) -> set[str]:
        """Each environment hub serves all domains."""
        has_hub, has_scorer = bool(self.hubs.keys() - {SCORER}), SCORER in self.hubs
        return {name for name in NAMES if has_hub and (has_scorer or name not in SCORED)}

    def working(self) -> list[str]:
        return sorted(name for name, hub in self.hubs.items() if not hub.is_frozen)

    # ---- events
    @rule()
    def pause_or_resume(self) -> None:
        self.paused = not self.paused

    @rule(name=st.sampled_from(["one", "two", SCORER]))
    def come_or_leave(self, name: str) -> None:
        """A hub that leaves hands back what it has."""
        if name not in self.hubs:
            self.hubs[name] = Hub()
        else:
            self.hand_back(self.hubs.pop(name), name)

    def hand_back(self, hub: Hub, name: str) -> None:
        for number in hub.tickets:
            if number in self.ledger.waiting_for:
                queue = self.played if name == SCORER else self.queues[self.waiting[number]]
                queue.insert(0, number)
        hub.tickets = {}

    @precondition(lambda self: self.hubs)
    @rule(data=st.data())
    def freeze_or_wake(self, data: st.DataObject) -> None:
        """What a frozen hub has goes back to its queue; when it wakes it abandons that."""
        name = data.draw(st.sampled_from(sorted(self.hubs)))
        hub = self.hubs[name]
        hub.is_frozen = not hub.is_frozen
        self.hand_back(hub, name)

    @precondition(lambda self: self.working())
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.working()))
        queue = self.played if name == SCORER else self.queues[data.draw(st.sampled_from(NAMES))]
        if queue and (number := queue.pop(0)) in self.ledger.waiting_for:
            self.hubs[name].tickets[number] = 0.0

    @precondition(lambda self: any(self.hubs[name].tickets for name in self.working()))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        name = data.draw(
            st.sampled_from([name for name in self.working() if self.hubs[name].tickets])
        )
        number = data.draw(st.sampled_from(sorted(self.hubs[name].tickets)))
        del self.hubs[name].tickets[number]
        if number not in self.ledger.waiting_for:
            return
        if name != SCORER and self.waiting[number] in SCORED:
            self.played.append(number)
        else:
            self.put(GroupArrival(number, self.ledger.state.version, (0.0, 1.0)))

    @rule(
        names=st.sets(st.sampled_from(NAMES), min_size=1),
        groups=st.integers(1, 3),
        staleness=st.integers(0, 2),
    )
    def start_again_with_other_rules(self, names: set[str], groups: int, staleness: int) -> None:
        """The new learner knows no ages: its tickets age from the beginning."""
        self.epoch += 1
        self.ages, self.expired = TicketAges(TIMEOUT_S), set()
        for hub in self.hubs.values():
            hub.tickets, hub.reported = dict.fromkeys(hub.tickets, 0.0), set()
        self.put(RulesUpdate(rules(names, groups, staleness), self.epoch))

    @rule(elapsed_s=st.sampled_from([4.0, 6.0, 1000.0]))
    def time_passes(self, elapsed_s: float) -> None:
        """All hubs that are not frozen report at its end."""
        waiting, served, late = self.waiting, self.served, set[int]()
        for name in self.working():
            hub = self.hubs[name]
            for number in hub.tickets.keys() & hub.reported & waiting.keys():
                if not self.paused and waiting[number] in served:
                    hub.tickets[number] += elapsed_s
                if hub.tickets[number] >= TIMEOUT_S:
                    late.add(number)
            hub.reported = set(hub.tickets)
        reports = {
            name: None if hub.is_frozen else list(hub.tickets) for name, hub in self.hubs.items()
        }
        fresh = late - self.expired
        self.expired |= late
        assert self.ages.passed(elapsed_s, waiting, reports, served, paused=self.paused) == sorted(
            fresh
        )
        for number in fresh:
            self.put(TicketEnd(number, "timeout"))

    @invariant()
    def only_open_tickets_expire(self) -> None:
        assert self.expired <= self.ledger.waiting_for


TestPatience = Patience.TestCase
TestPatience.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
