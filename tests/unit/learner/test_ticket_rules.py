"""The ledger with a curriculum: any interleaving, crash and resume gives the same tickets."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from broker.contract import wire
from learner.credit.ledger import (
    Action,
    GroupArrival,
    IssueTicket,
    Ledger,
    Record,
    RulesUpdate,
    TicketEnd,
)
from learner.credit.task_pool import (
    CurriculumRule,
    Stage,
    TaskPart,
    TaskRule,
    encode_levels,
    rates_of,
)
from learner.credit.ticket_rules import DomainRule, TicketRules

STAGES = (Stage(0, 0.0, 1.0), Stage(2, 0.25, 0.75))


def curriculum_rules(num_tasks: int = 12, **changes: object) -> TicketRules:
    rule = CurriculumRule(STAGES, "learnability", 0.1, 0.5)
    tasks = TaskRule((TaskPart(num_tasks),), "a", rule)
    mixed = TaskRule((TaskPart(3, 2.0), TaskPart(5, 1.0)), "b")
    domains = (
        DomainRule("lake", 1.0, 2, 2, 5.0, tasks=tasks),
        DomainRule("math", 1.0, 2, 2, 5.0, tasks=mixed),
        DomainRule("plain", 0.5, 2, 2, 5.0),
    )
    rules = TicketRules(
        6, 3, 1, "wait", 3, domains, filter_zero_variance=True, max_replacements_per_step=4
    )
    return replace(rules, **changes)  # type: ignore[arg-type]


def tickets_of(actions: list[Action]) -> list[wire.Ticket]:
    return [action.ticket for action in actions if isinstance(action, IssueTicket)]


def pass_rate_of(ledger: Ledger, task: int) -> float:
    return float(rates_of(ledger.state.pools["lake"].levels)[task])


class CurriculumFleet(RuleBasedStateMachine):
    """Hubs and a learner that is killed at any point and reads the log again."""

    @initialize()
    def start(self) -> None:
        self.first_rules = curriculum_rules()
        self.ledger = Ledger(self.first_rules)
        self.log: list[Record] = []
        self.num_changes = 0
        self.snapshots = [self.ledger.dump()]
        self.tickets = tickets_of(self.ledger.open_credit())

    def append(self, record: Record) -> None:
        self.log.append(record)
        self.tickets += tickets_of(self.ledger.apply(record, len(self.log)))
        while self.ledger.full:
            self.tickets += tickets_of(self.ledger.complete_step())
            self.snapshots.append(self.ledger.dump())

    @precondition(lambda self: not self.ledger.done)
    @rule(data=st.data(), successes=st.integers(0, 2))
    def finish(self, data: st.DataObject, successes: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.ledger.waiting_for)))
        rewards = (1.0,) * successes + (0.0,) * (2 - successes)
        version = self.ledger.ticket(number).min_version
        self.append(GroupArrival(number, version, rewards, successes=successes, episodes=2))

    @precondition(lambda self: not self.ledger.done)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.ledger.waiting_for)))
        self.append(TicketEnd(number, "env_error"))

    @precondition(lambda self: self.num_changes < 3)
    @rule(
        num_tasks=st.integers(1, 20), digest=st.sampled_from("ab"), explore=st.sampled_from([0, 1])
    )
    def change(self, num_tasks: int, digest: str, explore: int) -> None:
        """The learner is started again with another curriculum, perhaps on other data."""
        rule = CurriculumRule(
            STAGES, "uniform", float(explore), initial=encode_levels({0: 0.5}, num_tasks)
        )
        tasks = TaskRule((TaskPart(num_tasks),), f"{digest}{num_tasks}", rule)
        domains = (DomainRule("lake", 1.0, 2, 2, 5.0, tasks=tasks),)
        self.num_changes += 1
        self.append(RulesUpdate(curriculum_rules(domains=domains), self.num_changes))

    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        """A killed learner goes back to any checkpoint and reads the log again from there."""
        stored = json.loads(json.dumps(data.draw(st.sampled_from(self.snapshots))))
        ledger = Ledger.load(stored)
        tickets = tickets_of(ledger.open_credit())
        # A checkpoint may hold the whole next step.
        while ledger.full:
            tickets += tickets_of(ledger.complete_step())
        for seq in range(ledger.state.position + 1, len(self.log) + 1):
            tickets += tickets_of(ledger.apply(self.log[seq - 1], seq))
            while ledger.full:
                tickets += tickets_of(ledger.complete_step())
        assert ledger.state == self.ledger.state
        assert tickets == self.tickets[len(self.tickets) - len(tickets) :]
        self.ledger = ledger

    @invariant()
    def tasks_exist(self) -> None:
        if not hasattr(self, "ledger"):
            return
        for rule_of_domain in self.ledger.rules.domains:
            pool = self.ledger.state.pools.get(rule_of_domain.name)
            assert (pool is None) == (rule_of_domain.tasks is None)
            if pool is None or rule_of_domain.tasks is None:
                continue
            for ticket in self.tickets:
                if ticket.domain == rule_of_domain.name and ticket.number > pool.since:
                    assert 0 <= ticket.task_index < rule_of_domain.tasks.num_tasks

    def teardown(self) -> None:
        """The log alone decides: a new ledger that reads it issues the same tickets."""
        if not hasattr(self, "ledger"):
            return
        again = Ledger(self.first_rules)
        tickets = tickets_of(again.open_credit())
        for seq, record in enumerate(self.log, start=1):
            tickets += tickets_of(again.apply(record, seq))
            while again.full:
                tickets += tickets_of(again.complete_step())
        assert again.state == self.ledger.state
        assert tickets == self.tickets


def test_any_crash_gives_the_same_tickets() -> None:
    checks = settings(
        max_examples=60,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(CurriculumFleet, settings=checks)


def test_first_record_of_a_ticket_measures_its_task() -> None:
    domains = curriculum_rules().domains[:1]
    ledger = Ledger(curriculum_rules(domains=domains))
    first, second = tickets_of(ledger.open_credit())[:2]
    # Filtered for its equal rewards, and measured: 0 of 2.
    ledger.apply(GroupArrival(first.number, 0, (0.0, 0.0), successes=0, episodes=2), 1)
    assert pass_rate_of(ledger, first.task_index) == 0.0
    # A duplicate measures nothing.
    ledger.apply(GroupArrival(first.number, 0, (1.0, 1.0), successes=2, episodes=2), 2)
    assert pass_rate_of(ledger, first.task_index) == 0.0
    ledger.apply(GroupArrival(second.number, 0, (0.0, 1.0), successes=1, episodes=2), 3)
    assert pass_rate_of(ledger, second.task_index) == 0.5


def test_group_of_earlier_tasks_measures_nothing() -> None:
    domains = curriculum_rules().domains[:1]
    ledger = Ledger(curriculum_rules(domains=domains))
    ticket = tickets_of(ledger.open_credit())[0]
    tasks = domains[0].tasks
    assert tasks is not None
    changed = (replace(domains[0], tasks=replace(tasks, digest="other")),)
    ledger.apply(RulesUpdate(curriculum_rules(domains=changed), 1), 1)
    ledger.apply(GroupArrival(ticket.number, 0, (0.0, 1.0), successes=1, episodes=2), 2)
    assert set(ledger.state.pools["lake"].levels) == {255}


def test_other_settings_keep_the_pass_rates() -> None:
    domains = curriculum_rules().domains[:1]
    ledger = Ledger(curriculum_rules(domains=domains))
    ticket = tickets_of(ledger.open_credit())[0]
    ledger.apply(GroupArrival(ticket.number, 0, (0.0, 1.0), successes=1, episodes=2), 1)
    cursor = ledger.state.pools["lake"].parts[0].cursor
    ledger.apply(RulesUpdate(curriculum_rules(domains=domains, steps=7), 1), 2)
    assert pass_rate_of(ledger, ticket.task_index) == 0.5
    assert ledger.state.pools["lake"].parts[0].cursor == cursor


def test_tasks_in_turn_without_a_curriculum() -> None:
    ledger = Ledger(curriculum_rules(domains=(DomainRule("plain", 1.0, 2, 2, 5.0),)))
    assert [ticket.task_index for ticket in tickets_of(ledger.open_credit())] == [0, 1, 2, 3, 4, 5]
    assert ledger.state.pools == {}


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_tasks_without_signal_are_given_less_often(rate: float) -> None:
    """Ten tasks at one half and ten always or never solved, explore 0.1: the others get one in
    eleven tickets."""
    rates = {task: 0.5 if task < 10 else rate for task in range(20)}
    rule = CurriculumRule(STAGES[:1], "learnability", 0.1, initial=encode_levels(rates, 20))
    tasks = TaskRule((TaskPart(20),), "a", rule)
    domains = (DomainRule("lake", 1.0, 2, 2, 5.0, tasks=tasks),)
    rules = curriculum_rules(domains=domains, groups_per_step=1100, steps=1)
    tickets = tickets_of(Ledger(rules).open_credit())
    assert sum(ticket.task_index >= 10 for ticket in tickets) == pytest.approx(100, abs=30)
