"""The ledger by hand-worked examples."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest

from broker.settings.config import DomainSection
from learner.config import AlgorithmSection, TrainSection
from learner.credit.ledger import (
    REMOVED,
    WITHDRAWN,
    Action,
    ForgetTicket,
    GroupArrival,
    HoldGroup,
    IssueTicket,
    Ledger,
    RefuseRecord,
    RulesUpdate,
    TakeGroup,
    TicketEnd,
    is_zero_variance,
)
from learner.credit.ticket_rules import DomainRule, TicketRules, next_domain, rules_of, task_seed


def rules(
    steps: int = 3, groups: int = 2, staleness: int = 1, on_late: str = "wait", **more: object
) -> TicketRules:
    lake = DomainRule("lake", 1.0, group_size=4, min_group_size=3, deadline_s=9.0)
    defaults = TicketRules(steps, groups, staleness, on_late, seed=7, domains=(lake,))  # type: ignore[arg-type]
    return replace(defaults, **more)  # type: ignore[arg-type]


def issued(actions: list[Action]) -> list[int]:
    return [a.ticket.number for a in actions if isinstance(a, IssueTicket)]


def taken(actions: list[Action]) -> list[int]:
    return [a.number for a in actions if isinstance(a, TakeGroup)]


def counts(ledger: Ledger) -> tuple[int, ...]:
    c = ledger.counts()
    assert c["issued"] == c["trained"] + c["filtered"] + c["dropped"] + c["dead"] + c["open"]
    return (c["issued"], c["trained"], c["filtered"], c["dropped"], c["dead"], c["open"])


def arrived(number: int, version: int = 0, rewards: tuple[float, ...] = (0.0, 1.0)) -> GroupArrival:
    return GroupArrival(number, version, rewards)


def test_credit_over_a_whole_run() -> None:
    ledger = Ledger(rules(steps=3, groups=2, staleness=1))
    assert issued(ledger.open_credit()) == [1, 2, 3, 4]
    assert ledger.open_credit() == []
    assert ledger.apply(arrived(2), 1) == [HoldGroup(2), TakeGroup(2)]
    assert ledger.apply(arrived(1), 2) == [HoldGroup(1), TakeGroup(1)]
    assert ledger.full
    assert issued(ledger.complete_step()) == [5, 6]
    assert counts(ledger) == (6, 2, 0, 0, 0, 4)
    for seq, number in ((3, 3), (4, 4)):
        ledger.apply(arrived(number), seq)
    assert ledger.complete_step() == []  # min(2 + 1 + 1, 3) * 2 = 6 are out already
    for seq, number in ((5, 6), (6, 5)):
        ledger.apply(arrived(number, 1), seq)
    assert ledger.complete_step() == []
    assert ledger.done
    assert counts(ledger) == (6, 6, 0, 0, 0, 0)


def test_greedy_episodes_come_on_top_of_the_group() -> None:
    ledger = Ledger(rules(domains=(DomainRule("lake", 1.0, 4, 3, 9.0, num_greedy=1),)))
    tickets = [action.ticket for action in ledger.open_credit() if isinstance(action, IssueTicket)]
    assert {(t.group_size, t.min_group_size, t.num_greedy) for t in tickets} == {(5, 4, 1)}
    domains = {"lake": DomainSection(env="x", group_size=1, deadline_s=9)}
    for estimator, num_greedy in (("remax", 1), ("grpo", 0)):
        asked = rules_of(TrainSection(), AlgorithmSection(adv_estimator=estimator), domains, 0)
        assert asked.domain("lake").num_greedy == num_greedy


def test_redundant_episodes_come_on_top_of_the_group() -> None:
    ledger = Ledger(rules(domains=(DomainRule("lake", 1.0, 4, 3, 9.0, num_redundant=2),)))
    tickets = [action.ticket for action in ledger.open_credit() if isinstance(action, IssueTicket)]
    assert {(t.group_size, t.min_group_size, t.num_redundant) for t in tickets} == {(6, 3, 2)}
    domains = {"lake": DomainSection(env="x", group_size=4, group_size_redundancy=2, deadline_s=9)}
    asked = rules_of(TrainSection(), AlgorithmSection(), domains, 0).domain("lake")
    assert (asked.group_size, asked.min_group_size, asked.num_redundant) == (4, 4, 2)


def test_groups_of_a_full_step_that_are_not_chosen_are_filtered_and_not_replaced() -> None:
    # A quarter of two groups is one: the other one counts as filtered, and the next step's two
    # tickets are all that is issued.
    ledger = Ledger(rules(keep_fraction=0.25))
    assert issued(ledger.open_credit()) == [1, 2, 3, 4]
    for seq, number in ((1, 1), (2, 2)):
        ledger.apply(arrived(number), seq)
    assert issued(ledger.complete_step()) == [5, 6]
    assert counts(ledger) == (6, 1, 1, 0, 0, 4)
    domains = {"lake": DomainSection(env="x", deadline_s=9)}
    for variant, fraction in (("starpo_s", 0.25), ("ppo", 1.0)):
        assert (
            rules_of(TrainSection(), AlgorithmSection(pg_variant=variant), domains, 0).keep_fraction
            == fraction
        )


def test_what_stands_on_a_ticket() -> None:
    ledger = Ledger(rules())
    first = ledger.open_credit()[0]
    assert isinstance(first, IssueTicket)
    t = first.ticket
    assert (t.number, t.domain, t.task_index, t.min_version, t.max_staleness) == (
        1,
        "lake",
        0,
        0,
        1,
    )
    assert (t.group_size, t.min_group_size, t.deadline_s) == (4, 3, 9.0)
    assert t.seed == task_seed(7, "train", "lake", 0) == 4991171585596122  # b2sum -l 64
    assert ledger.ticket(1) == t
    with pytest.raises(KeyError):
        ledger.ticket(99)


def test_seed_depends_on_each_part_and_is_exact_in_a_double() -> None:
    seeds = {
        task_seed(run, split, domain, index)
        for run in (0, 1)
        for split in ("train", "eval")
        for domain in "ab"
        for index in range(50)
    }
    assert len(seeds) == 400
    assert all(0 <= seed < 2**53 for seed in seeds)


def test_first_record_counts_later_ones_are_duplicates_and_strangers_refused() -> None:
    ledger = Ledger(rules(groups=3))
    ledger.open_credit()
    ledger.apply(arrived(1), 1)
    assert ledger.apply(arrived(1), 2) == [RefuseRecord(1, "duplicate")]
    assert ledger.apply(TicketEnd(1, "timeout"), 3) == [RefuseRecord(1, "duplicate")]
    assert [type(a) for a in ledger.apply(TicketEnd(2, "deadline"), 4)] == [
        ForgetTicket,
        IssueTicket,
    ]
    assert ledger.apply(arrived(2), 5) == [RefuseRecord(2, "duplicate")]
    for seq, number in ((6, 0), (7, -3), (8, 8)):
        assert ledger.apply(arrived(number), seq) == [RefuseRecord(number, "unknown")]
    assert counts(ledger) == (7, 0, 0, 0, 1, 6)
    assert ledger.counts()["duplicate"] == 3
    assert ledger.counts()["unknown"] == 3
    assert ledger.waiting_for == {3, 4, 5, 6, 7}


def test_records_come_in_order_and_not_into_a_full_step() -> None:
    ledger = Ledger(rules(groups=1, staleness=1))
    ledger.open_credit()
    with pytest.raises(ValueError, match="has 0 of 1 groups"):
        ledger.complete_step()
    ledger.apply(arrived(1), 5)
    with pytest.raises(ValueError, match="step 0 is full"):
        ledger.apply(arrived(2), 6)
    ledger.complete_step()
    with pytest.raises(ValueError, match="record 5 comes after record 5"):
        ledger.apply(arrived(2), 5)


def test_late_closing_counts_dropped_and_others_dead_each_replaced_by_the_next_task() -> None:
    ledger = Ledger(rules(groups=2))
    ledger.open_credit()
    out = ledger.apply(TicketEnd(1, "late"), 1) + ledger.apply(TicketEnd(2, "env_error"), 2)
    assert issued(out) == [5, 6]
    assert [a.ticket.task_index for a in out if isinstance(a, IssueTicket)] == [4, 5]
    assert counts(ledger) == (6, 0, 0, 1, 1, 4)
    assert ledger.state.reasons == {"late": 1, "env_error": 1}


def test_drop_takes_in_log_order_and_replaces_the_late() -> None:
    ledger = Ledger(rules(steps=4, groups=1, staleness=1, on_late="drop"))
    ledger.open_credit()  # 1, 2 at version 0
    assert taken(ledger.apply(arrived(1), 1)) == [1]
    ledger.complete_step()  # 3 at version 1
    assert taken(ledger.apply(arrived(3, 1), 2)) == [3]  # overtakes 2, which is at the bound
    ledger.complete_step()  # 4 at version 2
    out = ledger.apply(arrived(2, 0), 3)  # 0 < 2 - 1
    assert out[0] == ForgetTicket(2, "dropped")
    assert isinstance(out[1], IssueTicket)
    assert (out[1].ticket.number, out[1].ticket.min_version) == (5, 2)
    assert counts(ledger) == (5, 2, 0, 1, 0, 2)


def test_wait_keeps_places_for_tickets_at_the_bound() -> None:
    ledger = Ledger(rules(steps=4, groups=2, staleness=1))
    ledger.open_credit()  # 1-4 at version 0
    ledger.apply(arrived(1), 1)
    ledger.apply(arrived(2), 2)
    ledger.complete_step()  # 5, 6 at version 1; 3, 4 are at the bound
    assert ledger.apply(arrived(5, 1), 3) == [HoldGroup(5)]
    assert taken(ledger.apply(arrived(4, 0), 4)) == [4]
    assert ledger.apply(arrived(6, 1), 5) == [HoldGroup(6)]
    assert ledger.first_needed == 3
    assert taken(ledger.apply(arrived(3, 0), 6)) == [3]
    out = ledger.complete_step()  # 7, 8 at version 2; 5 and 6 come out of the queue
    assert (issued(out), taken(out)) == ([7, 8], [5, 6])
    assert ledger.full
    # not trained yet: a learner that resumes from here reads 5 and 6 again
    assert ledger.first_needed == 3
    assert [(entry.number, entry.seq) for entry in ledger.arrived] == [(5, 3), (6, 5)]


def test_wait_releases_a_reserved_place_when_its_ticket_dies() -> None:
    ledger = Ledger(rules(steps=4, groups=2, staleness=1))
    ledger.open_credit()
    ledger.apply(arrived(1), 1)
    ledger.apply(arrived(2), 2)
    ledger.complete_step()
    ledger.apply(arrived(5, 1), 3)
    out = ledger.apply(TicketEnd(3, "timeout"), 4)  # one of the two places falls free
    assert (issued(out), taken(out)) == ([7], [5])
    assert ledger.apply(arrived(6, 1), 5) == [HoldGroup(6)]  # the other is still 4's


def test_wait_looks_ahead_with_larger_staleness() -> None:
    """K = 2, G = 1: reserving only at the bound would let newer groups pass until two tickets need
    one place.
    """
    ledger = Ledger(rules(steps=9, groups=1, staleness=2))
    ledger.open_credit()  # 1, 2, 3 due in step 2
    ledger.apply(arrived(1), 1)
    ledger.complete_step()  # 4 due in step 3, now is step 1: 2 and 3 need steps 1 and 2
    assert ledger.apply(arrived(4, 1), 2) == [HoldGroup(4)]
    assert taken(ledger.apply(arrived(3), 3)) == [3]
    ledger.complete_step()  # 5 due in step 4, now is step 2: 2 needs it
    assert ledger.apply(arrived(5, 2), 4) == [HoldGroup(5)]
    assert taken(ledger.apply(arrived(2), 5)) == [2]
    assert taken(ledger.complete_step()) == [4]


def test_tokens_older_than_the_ticket_allowed_are_dropped_even_from_the_queue() -> None:
    ledger = Ledger(rules(steps=5, groups=1, staleness=1))
    ledger.open_credit()
    ledger.apply(arrived(1), 1)
    ledger.complete_step()  # version 1, ticket 3 has min_version 1
    # sampled at 0 in spite of it; in time for step 1 only
    assert ledger.apply(arrived(3, 0), 2) == [HoldGroup(3)]
    ledger.apply(arrived(2, 0), 3)
    out = ledger.complete_step()  # version 2
    assert ForgetTicket(3, "dropped") in out
    assert issued(out) == [4, 5]


def test_on_policy_takes_nothing_older() -> None:
    ledger = Ledger(rules(steps=3, groups=1, staleness=0))
    assert issued(ledger.open_credit()) == [1]
    ledger.apply(arrived(1), 1)
    assert issued(ledger.complete_step()) == [2]
    assert ledger.ticket(2).min_version == 1
    assert ledger.apply(arrived(2, 0), 2)[0] == ForgetTicket(2, "dropped")
    assert taken(ledger.apply(arrived(3, 1), 3)) == [3]


def test_filter_replaces_up_to_its_bound_and_then_trains_what_there_is() -> None:
    ledger = Ledger(
        rules(
            steps=2, groups=1, staleness=0, filter_zero_variance=True, max_replacements_per_step=2
        )
    )
    ledger.open_credit()
    same = (0.5, 0.5, 0.5)
    assert ledger.apply(arrived(1, 0, same), 1)[0] == ForgetTicket(1, "filtered")
    assert ledger.apply(arrived(2, 0, same), 2)[0] == ForgetTicket(2, "filtered")
    assert taken(ledger.apply(arrived(3, 0, same), 3)) == [3]
    assert counts(ledger) == (3, 0, 2, 0, 0, 1)
    ledger.complete_step()
    # the bound is per step
    assert ledger.apply(arrived(4, 1, same), 4)[0] == ForgetTicket(4, "filtered")


@pytest.mark.parametrize(
    ("rewards", "zero"),
    [
        ((1.0,), True),
        ((1.0, 1.0), True),
        ((0.0, 1.0), False),
        ((0.0, 1e-6), True),
        ((0.0, 2e-6), False),
        ((0.1, 0.1, 0.1), True),
    ],
)
def test_zero_variance(rewards: tuple[float, ...], zero: bool) -> None:
    assert is_zero_variance(rewards) is zero  # std of (0, x) with ddof 1 is x / sqrt(2)


def test_interleaving_is_exact() -> None:
    domains = [
        DomainRule(name, weight, 1, 1, 1.0)
        for name, weight in (("a", 0.5), ("b", 0.25), ("c", 0.25))
    ]
    seen: Counter[str] = Counter()
    order = ""
    for _ in range(8):
        name = next_domain(domains, dict(seen))
        seen[name] += 1
        order += name
    assert order == "abcaabca"
    weights = {"a": Fraction(0.7), "b": Fraction(0.3)}
    pair = [DomainRule(name, float(weight), 1, 1, 1.0) for name, weight in weights.items()]
    seen = Counter()
    for n in range(1, 2001):
        seen[next_domain(pair, dict(seen))] += 1
        assert all(
            abs(seen[name] - n * weight / sum(weights.values())) < 1
            for name, weight in weights.items()
        )


def test_state_survives_json() -> None:
    ledger = Ledger(rules(steps=4))
    ledger.open_credit()
    ledger.apply(arrived(1), 1)
    ledger.apply(arrived(2), 2)
    ledger.complete_step()
    ledger.apply(arrived(5, 1), 3)
    ledger.apply(TicketEnd(3, "late"), 4)
    again = Ledger.load(json.loads(json.dumps(ledger.dump())))
    assert again.state == ledger.state
    assert again.dump() == ledger.dump()
    assert again.open_credit() == []
    assert again.apply(arrived(4), 5) == ledger.apply(arrived(4), 5)


def test_more_groups_per_step_ask_for_what_is_missing() -> None:
    ledger = Ledger(rules(steps=4, groups=2, staleness=1))
    ledger.open_credit()
    assert issued(ledger.apply(RulesUpdate(rules(steps=4, groups=3, staleness=1), epoch=2), 1)) == [
        5,
        6,
    ]
    assert ledger.state.rules_epoch == 2


def test_rules_apply_from_their_record_on() -> None:
    """A resumed ledger runs by the rules that it had until it reads the record that changes them."""
    ledger = Ledger(rules(steps=4, groups=2, staleness=1))
    ledger.open_credit()
    before = ledger.dump()
    ledger.apply(arrived(1), 1)
    ledger.apply(RulesUpdate(rules(steps=4, groups=1, staleness=0), epoch=2), 2)
    assert ledger.full
    again = Ledger.load(json.loads(json.dumps(before)))
    assert again.rules == rules(steps=4, groups=2, staleness=1)
    again.apply(arrived(1), 1)
    assert not again.full
    again.apply(RulesUpdate(rules(steps=4, groups=1, staleness=0), epoch=2), 2)
    assert again.state == ledger.state


def test_the_same_rules_again_change_nothing() -> None:
    ledger = Ledger(rules())
    ledger.open_credit()
    assert ledger.apply(RulesUpdate(rules(), epoch=3), 1) == []
    assert (ledger.state.rules_epoch, ledger.state.position, ledger.open) == (3, 1, 4)


def test_less_staleness_withdraws_the_newest_and_replaces_none() -> None:
    ledger = Ledger(rules(steps=9, groups=2, staleness=2))
    assert issued(ledger.open_credit()) == [1, 2, 3, 4, 5, 6]
    ledger.apply(arrived(6), 1)
    ledger.apply(arrived(5), 2)  # the step under way: full
    ledger.complete_step()  # 7, 8
    ledger.apply(arrived(8, 1), 3)  # held: 1-4 have the places
    out = ledger.apply(RulesUpdate(rules(steps=9, groups=2, staleness=0), epoch=2), 4)
    # Of 1, 2, 3, 4, 7, 8 only two may live on. 7 has no group and is the newest such; 8, which has
    # one, goes last.
    assert [action.number for action in out if isinstance(action, ForgetTicket)] == [7, 4, 3, 2]
    assert {action.reason for action in out if isinstance(action, ForgetTicket)} == {WITHDRAWN}
    assert issued(out) == []
    assert taken(out) == [8]  # both have a place
    assert counts(ledger) == (8, 2, 0, 4, 0, 2)
    assert taken(ledger.apply(arrived(1, 1), 5)) == [1]
    assert issued(ledger.complete_step()) == [9, 10]


def test_a_domain_that_is_gone_is_replaced_by_those_that_exist() -> None:
    lake, maze, quiz = (DomainRule(name, 1.0, 1, 1, 9.0) for name in ("lake", "maze", "quiz"))
    ledger = Ledger(rules(steps=9, groups=2, staleness=1, domains=(lake, maze)))
    opened = ledger.open_credit()
    assert [action.ticket.domain for action in opened if isinstance(action, IssueTicket)] == [
        "lake",
        "maze",
        "lake",
        "maze",
    ]
    ledger.apply(arrived(2), 1)  # maze, in the step under way
    out = ledger.apply(
        RulesUpdate(rules(steps=9, groups=2, staleness=1, domains=(lake, quiz)), epoch=2), 2
    )
    assert out[0] == ForgetTicket(4, "dropped", REMOVED)
    assert [
        (action.ticket.number, action.ticket.domain)
        for action in out
        if isinstance(action, IssueTicket)
    ] == [(5, "lake")]
    assert counts(ledger) == (5, 0, 0, 1, 0, 4)
    assert ledger.state.reasons == {REMOVED: 1}
    assert ledger.apply(arrived(4), 3) == [RefuseRecord(4, "duplicate")]
    # it was taken by the rules of its time
    assert [entry.number for entry in ledger.state.taken] == [2]
    gone = ledger.lose({2})  # … unless the log has lost it: then its ticket is replaced, too
    assert [entry.number for entry in gone] == [2]
    assert [
        action.ticket.domain
        for action in ledger.apply(TicketEnd(2, "lost"), 4)
        if isinstance(action, IssueTicket)
    ] == ["quiz"]


def test_a_group_in_the_queue_of_a_domain_that_is_gone_is_dropped() -> None:
    lake, maze = (DomainRule(name, 1.0, 1, 1, 9.0) for name in ("lake", "maze"))
    ledger = Ledger(rules(steps=9, groups=2, staleness=1, domains=(lake, maze)))
    ledger.open_credit()  # 1 and 3 are lake's, 2 and 4 are maze's
    ledger.apply(arrived(1), 1)
    ledger.apply(arrived(3), 2)
    ledger.complete_step()  # 5 lake, 6 maze
    ledger.apply(arrived(6, 1), 3)
    assert [entry.number for entry in ledger.state.queue] == [6]
    out = ledger.apply(
        RulesUpdate(rules(steps=9, groups=2, staleness=1, domains=(lake,)), epoch=2), 4
    )
    assert [action.number for action in out if isinstance(action, ForgetTicket)] == [6, 4, 2]
    assert ledger.state.queue == []
    assert ledger.waiting_for == {5, 7, 8, 9}
    assert {ticket.domain for ticket in ledger.state.live.values()} == {"lake"}


def test_shares_count_from_the_change_on() -> None:
    def domains(ratio: float) -> tuple[DomainRule, ...]:
        return DomainRule("a", 1.0, 1, 1, 9.0), DomainRule("b", ratio, 1, 1, 9.0)

    ledger = Ledger(rules(steps=10_000, groups=10, staleness=0, domains=domains(1.0)))
    seen = [
        action.ticket.domain for action in ledger.open_credit() if isinstance(action, IssueTicket)
    ]
    seq = 0
    for _ in range(800):
        for number in sorted(ledger.waiting_for):
            seq += 1
            ledger.apply(arrived(number, ledger.state.version), seq)
        seen += [
            action.ticket.domain
            for action in ledger.complete_step()
            if isinstance(action, IssueTicket)
        ]
    assert Counter(seen) == {"a": 4005, "b": 4005}
    ledger.apply(
        RulesUpdate(rules(steps=10_000, groups=10, staleness=0, domains=domains(3.0)), epoch=2),
        seq + 1,
    )
    seq, seen = seq + 1, []
    for _ in range(40):
        for number in sorted(ledger.waiting_for):
            seq += 1
            ledger.apply(arrived(number, ledger.state.version), seq)
        seen += [
            action.ticket.domain
            for action in ledger.complete_step()
            if isinstance(action, IssueTicket)
        ]
    assert Counter(seen) == {"a": 100, "b": 300}


def test_more_steps_for_a_run_that_is_done() -> None:
    ledger = Ledger(rules(steps=1, groups=1, staleness=1))
    ledger.open_credit()
    ledger.apply(arrived(1), 1)
    assert ledger.complete_step() == []
    assert ledger.done
    assert issued(ledger.apply(RulesUpdate(rules(steps=3, groups=1, staleness=1), epoch=2), 2)) == [
        2,
        3,
    ]
    assert not ledger.done
