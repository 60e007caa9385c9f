"""The ledger under any interleaving of completion, loss, redelivery, duplication and late tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction

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
    ForgetTicket,
    GroupArrival,
    HoldGroup,
    IssueTicket,
    Ledger,
    Record,
    RulesUpdate,
    SkipTickets,
    TakeGroup,
    TicketEnd,
)
from learner.credit.ticket_rules import DomainRule, TicketRules

REASONS = (
    "late",
    "deadline",
    "env_error",
    "reward_error",
    "too_large",
    "malformed",
    "timeout",
    "too_many_deliveries",
    "poisonous",
    "aborted",
    "lost",
)


class Fleet(RuleBasedStateMachine):
    """Plays hubs, reward hubs and a lossy network against one ledger; the log it writes is replayed
    again and again.
    """

    on_late = "wait"
    max_staleness = 1
    honest = False  # whether tokens are never older than the ticket's min_version
    changes = False  # whether the rules change on the way

    @initialize(
        steps=st.integers(1, 5),
        groups=st.integers(1, 4),
        weights=st.lists(st.sampled_from([0.1, 0.3, 1.0, 2.0]), min_size=1, max_size=3),
        filtering=st.booleans(),
        bound=st.integers(0, 3),
    )
    def start(
        self, steps: int, groups: int, weights: list[float], filtering: bool, bound: int
    ) -> None:
        domains = tuple(DomainRule(f"d{i}", weight, 2, 2, 5.0) for i, weight in enumerate(weights))
        self.rules_ = TicketRules(
            steps, groups, self.max_staleness, self.on_late, 3, domains, filtering, "", bound
        )  # type: ignore[arg-type]
        self.first_rules = self.rules_
        self.ledger = Ledger(self.rules_)
        self.log: list[Record] = []
        self.num_changes = 0
        # tickets without a record of their own that a change of the rules ended
        self.num_by_rules = 0
        self.origin = 0  # first-time tickets before the shares last changed
        self.issued: list[wire.Ticket] = []
        self.skipped: list[int] = []  # numbers that count as issued and dead
        self.skips = 0  # records that said so
        self.steps: list[list[int]] = []
        self.now: list[int] = []
        self.held: set[int] = set()
        self.oldest: dict[int, int] = {}
        self.ended: dict[int, str] = {}
        self.snapshots: list[tuple[int, dict[str, object]]] = []
        self.do(self.ledger.open_credit())

    # ---- what a service does with the actions
    def do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case IssueTicket(ticket):
                    assert ticket.number == len(self.issued) + len(self.skipped) + 1
                    assert ticket.min_version == self.ledger.state.version
                    self.issued.append(ticket)
                case SkipTickets(first, last):
                    assert (
                        first
                        == len(self.issued) + len(self.skipped) + 1
                        <= last
                        == self.ledger.state.issued
                    )
                    self.skipped += range(first, last + 1)
                    self.skips += 1
                case HoldGroup(number):
                    assert number not in self.held
                    self.held.add(number)
                case TakeGroup(number):
                    self.held.remove(number)
                    assert number not in self.ended
                    self.ended[number] = "taken"
                    assert (
                        self.oldest[number] >= self.ledger.state.version - self.rules_.max_staleness
                    ), "staleness bound"
                    self.now.append(number)
                case ForgetTicket(number, outcome, reason):
                    self.num_by_rules += reason != "" and number not in self.held
                    self.held.discard(number)
                    assert number not in self.ended
                    self.ended[number] = outcome
                    if (
                        not self.changes
                        and self.honest
                        and self.on_late == "wait"
                        and outcome == "dropped"
                    ):
                        assert number not in self.oldest, "wait discards nobody"

    def put(self, record: Record) -> None:
        self.log.append(record)
        if isinstance(record, GroupArrival):
            self.oldest.setdefault(record.ticket, record.oldest_version)
        self.do(self.ledger.apply(record, len(self.log)))
        if self.ledger.full:
            assert len(self.now) == self.rules_.groups_per_step or self.num_changes
            assert len(self.now) >= self.rules_.groups_per_step
            self.steps.append(self.now)
            self.now = []
            self.do(self.ledger.complete_step())
            self.snapshots.append((len(self.log), self.ledger.dump()))
            while self.ledger.full:
                self.steps.append(self.now)
                self.now = []
                self.do(self.ledger.complete_step())

    def group(self, ticket: wire.Ticket, age: int, same: bool) -> GroupArrival:
        """Tokens from the newest version back to ``age`` versions ago, never older than the ticket
        allows where honest.
        """
        floor = ticket.min_version if self.honest else 0
        return GroupArrival(
            ticket.number,
            max(floor, self.ledger.state.version - age),
            (1.0, 1.0) if same else (0.0, 1.0),
        )

    # ---- events
    @precondition(lambda self: not self.ledger.done)
    @rule(data=st.data(), age=st.integers(0, 6), same=st.booleans(), times=st.integers(1, 2))
    def finish(self, data: st.DataObject, age: int, same: bool, times: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.ledger.waiting_for)))
        record = self.group(self.ledger.ticket(number), age, same)
        for _ in range(times):
            self.put(record)

    @precondition(lambda self: not self.ledger.done)
    @rule(data=st.data(), reason=st.sampled_from(REASONS))
    def close(self, data: st.DataObject, reason: str) -> None:
        self.put(TicketEnd(data.draw(st.sampled_from(sorted(self.ledger.waiting_for))), reason))

    @precondition(lambda self: any(not isinstance(record, RulesUpdate) for record in self.log))
    @rule(data=st.data())
    def redeliver(self, data: st.DataObject) -> None:
        self.put(
            data.draw(
                st.sampled_from(
                    [record for record in self.log if not isinstance(record, RulesUpdate)]
                )
            )
        )

    @rule(number=st.integers(-2, 3), reason=st.sampled_from(REASONS))
    def stranger(self, number: int, reason: str) -> None:
        self.put(TicketEnd(0 if number <= 0 else self.ledger.state.issued + number, reason))

    @precondition(lambda self: self.changes and self.num_changes < 3)
    @rule(
        more_steps=st.integers(0, 2),
        groups=st.integers(1, 4),
        staleness=st.integers(0, 3),
        weights=st.dictionaries(
            st.sampled_from(["d0", "d1", "new"]), st.sampled_from([0.1, 1.0, 2.0]), min_size=1
        ),
    )
    def change(
        self, more_steps: int, groups: int, staleness: int, weights: dict[str, float]
    ) -> None:
        """The learner is started again with other settings."""
        domains = tuple(
            DomainRule(name, weight, 2, 2, 5.0) for name, weight in sorted(weights.items())
        )
        before = self.rules_
        self.rules_ = replace(
            before,
            steps=before.steps + more_steps,
            groups_per_step=groups,
            max_staleness=staleness,
            domains=domains,
        )
        self.num_changes += 1
        self.put(RulesUpdate(self.rules_, self.num_changes))
        live = self.ledger.state.live
        taken = {entry.number for entry in self.ledger.state.taken}
        assert {live[number].domain for number in live.keys() - taken} <= weights.keys(), (
            "no ticket waits for a domain that is gone"
        )

    @rule()
    def restart(self) -> None:
        self.ledger = Ledger.load(json.loads(json.dumps(self.ledger.dump())))
        assert self.ledger.open_credit() == []

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data())
    def resume_from_a_checkpoint(self, data: st.DataObject) -> None:
        """A killed learner goes back to a snapshot and reads the log again: the same ledger comes
        out.
        """
        _position, dumped = data.draw(st.sampled_from(self.snapshots))
        ledger = Ledger.load(dumped)
        for seq in range(ledger.state.position + 1, len(self.log) + 1):
            while ledger.full:
                ledger.complete_step()
            ledger.apply(self.log[seq - 1], seq)
        while ledger.full:
            ledger.complete_step()
        assert ledger.state == self.ledger.state

    # ---- what always holds
    @invariant()
    def conservation(self) -> None:
        if not hasattr(self, "ledger"):
            return
        c, s, r = self.ledger.counts(), self.ledger.state, self.rules_
        assert c["issued"] == c["trained"] + c["filtered"] + c["dropped"] + c["dead"] + c["open"]
        assert c["issued"] == len(self.issued) + len(self.skipped)
        replaced = c["filtered"] + c["dropped"] + c["dead"]
        assert c["trained"] == sum(map(len, self.steps))
        assert c["open"] == s.credit - c["trained"]
        if not self.num_changes:
            assert (
                c["issued"]
                == min(s.version + 1 + r.max_staleness, r.steps) * r.groups_per_step + replaced
            )
            assert c["trained"] == s.version * r.groups_per_step
        assert c["open"] <= max(r.outstanding(s.version), len(s.taken))
        ended_by_records = (
            replaced - len(self.skipped) + self.skips - self.num_by_rules + self.num_changes
        )
        assert c["duplicate"] + c["unknown"] + len(s.taken) + len(s.queue) + c[
            "trained"
        ] + ended_by_records == len(self.log)
        assert self.held == {q.number for q in s.queue}

    @invariant()
    def exactly_once(self) -> None:
        if not hasattr(self, "ledger"):
            return
        trained = [number for step in self.steps for number in step] + self.now
        assert len(trained) == len(set(trained))
        assert self.now == [entry.number for entry in self.ledger.state.taken]

    @invariant()
    def places_suffice(self) -> None:
        """(*) of the ledger's docstring; with d = t, at most G tickets are at the bound."""
        if not hasattr(self, "ledger") or self.on_late == "drop" or self.num_changes:
            return
        s, r = self.ledger.state, self.rules_
        for due in range(s.version, s.version + r.max_staleness + 1):
            taken = {entry.number for entry in s.taken}
            live = [
                n
                for n, t in s.live.items()
                if t.min_version + r.max_staleness <= due and n not in taken
            ]
            assert len(live) <= (due - s.version + 1) * r.groups_per_step - len(s.taken)

    @invariant()
    def the_log_alone_decides(self) -> None:
        if not hasattr(self, "ledger") or len(self.log) % 5:
            return
        again = Ledger(self.first_rules)
        again.open_credit()
        for seq, record in enumerate(self.log, start=1):
            again.apply(record, seq)
            while again.full:
                again.complete_step()
        assert again.state == self.ledger.state

    @invariant()
    def domains_get_their_share(self) -> None:
        if not hasattr(self, "ledger"):
            return
        base, total = self.ledger.state.base, sum(Fraction(d.weight) for d in self.rules_.domains)
        assert base.keys() <= {d.name for d in self.rules_.domains}
        for d in self.rules_.domains:
            behind = Fraction(d.weight) * sum(base.values()) / total - base.get(d.name, 0)
            assert -1 < behind <= max(len(self.rules_.domains) - 1, 0)
        for name, num in self.ledger.state.tasks.items():
            assert sorted(t.task_index for t in self.issued if t.domain == name) == list(range(num))

    def teardown(self) -> None:
        """It always ends: as long as every open ticket gets a record, in whatever order, all steps
        complete.
        """
        if not hasattr(self, "ledger"):
            return
        for _ in range(self.rules_.steps * self.rules_.groups_per_step + 1):
            if self.ledger.done:
                break
            for number in sorted(self.ledger.waiting_for, reverse=True):
                if number in self.ledger.waiting_for:
                    self.put(self.group(self.ledger.ticket(number), 0, same=False))
            if self.ledger.done:
                break
            assert self.ledger.waiting_for, "nothing left to wait for, and not done"
        assert self.ledger.done
        assert self.ledger.counts()["open"] == 0
        assert self.ledger.state.queue == []
        assert len(self.steps) == self.rules_.steps
        assert len(self.ended) == len(self.issued), "every ticket that was issued has ended"


@pytest.mark.parametrize("honest", [True, False], ids=["honest", "stale-tokens"])
@pytest.mark.parametrize("max_staleness", [0, 1, 4])
@pytest.mark.parametrize("on_late", ["wait", "drop"])
def test_any_interleaving(on_late: str, max_staleness: int, honest: bool) -> None:
    machine = type(
        "Machine", (Fleet,), {"on_late": on_late, "max_staleness": max_staleness, "honest": honest}
    )
    checks = settings(
        max_examples=25,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=checks)


@pytest.mark.parametrize("on_late", ["wait", "drop"])
def test_any_interleaving_with_rules_that_change(on_late: str) -> None:
    machine = type("Machine", (Fleet,), {"on_late": on_late, "max_staleness": 1, "changes": True})
    checks = settings(
        max_examples=60,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=checks)
