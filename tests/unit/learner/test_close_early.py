"""Groups that are closed early: only those that the filter would have dropped however they had
ended.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.contract import examples, wire
from broker.contract.pass_rate import never_within
from broker.errors import ConfigError
from broker.jetstream.bus import LogRecord
from broker.settings.run_settings import RunSettings
from envhub.scheduling.line import GroupJob
from envhub.scheduling.slots import CloseTicket, EpisodeSlots, FinishGroup, StartEpisode
from learner.algorithm.filters import passes_pass_rate
from learner.algorithm_checks import check_algorithm
from learner.config import AlgorithmSection
from learner.credit.ledger import ForgetTicket, GroupArrival, IssueTicket, Ledger, TicketEnd
from learner.credit.record_intake import read_record
from learner.credit.ticket_rules import DomainRule, TicketRules

BOUNDS = (
    st.tuples(st.sampled_from([0.0, 0.1, 0.2, 1 / 3, 0.5, 0.8, 1.0]), st.floats(0, 1))
    .map(sorted)
    .map(tuple)
)


def group(successes: dict[int, bool], num_greedy: int = 0, size: int = 0) -> wire.Group:
    """A group of these episodes, of which those from ``size - num_greedy`` on are baselines."""
    example = next(one for one in examples.EXAMPLES.values() if isinstance(one, wire.Group))
    base = example.trajectories[0]
    trajectories = [
        msgspec.structs.replace(base, episode=i, success=solved, greedy=i >= size - num_greedy > 0)
        for i, solved in sorted(successes.items())
    ]
    return msgspec.structs.replace(example, trajectories=trajectories)


@given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 6), BOUNDS)
def test_what_is_certain_is_certain_for_every_completion(
    solved: int, failed: int, left: int, bounds: Any
) -> None:
    certain = never_within(solved, solved + failed, left, *bounds)
    kept = False
    for joined in range(left + 1):
        for good in range(joined + 1):
            outcomes = [True] * (solved + good) + [False] * (failed + joined - good)
            if outcomes:
                kept |= passes_pass_rate(bounds, group(dict(enumerate(outcomes))))
    assert not (certain and kept)
    if not left and solved + failed:
        assert certain is not kept  # nothing is open: the filter itself


@given(st.data())
def test_a_group_that_a_hub_closes_would_have_been_dropped_however_it_had_ended(
    data: st.DataObject,
) -> None:
    """Any order of ends, scores and losses; after the closing, every way to go on that the hub
    knows is filtered.
    """
    size, greedy = data.draw(st.integers(1, 7)), data.draw(st.integers(0, 1))
    size += greedy
    least = data.draw(st.integers(1, size))
    bounds = data.draw(BOUNDS)
    redundant = data.draw(st.integers(0, size - least))
    job = GroupJob(
        "t", size, least, 60.0, num_redundant=redundant, num_greedy=greedy, pass_rate=bounds
    )
    truth = [data.draw(st.booleans()) for _ in range(size)]

    slots = EpisodeSlots(size, max_retries=0)
    running = {
        action.episode for action in slots.offer(job, 0.0) if isinstance(action, StartEpisode)
    }
    done, unjudged, ends = set[int](), set[int](), list[Any]()
    while not ends and (running or unjudged):
        what = data.draw(
            st.sampled_from(
                (["finish", "lose"] if running else []) + (["judge"] if unjudged else [])
            )
        )
        episode = data.draw(st.sampled_from(sorted(unjudged if what == "judge" else running)))
        if what == "judge":
            unjudged.remove(episode)
            actions = slots.judged("t", episode, solved=truth[episode])
        else:
            running.remove(episode)
            if what == "finish":
                done.add(episode)
                unjudged.add(episode)
                actions = slots.finished("t", episode)
            else:
                actions = slots.failed("t", episode, "env", "lost")
        ends = [action for action in actions if isinstance(action, FinishGroup | CloseTicket)]
    if not ends or not isinstance(ends[0], CloseTicket) or ends[0].reason != "filtered":
        return
    assert slots.running == 0
    known = {one: truth[one] for one in done - unjudged}
    still_open = [one for one in running | unjudged if one < size - greedy]
    # those that end in the group, and those of them that succeed
    for joined in range(len(still_open) + 1):
        for good in range(joined + 1):
            outcomes = known | {one: i < good for i, one in enumerate(still_open[:joined])}
            assert not passes_pass_rate(bounds, group(outcomes, greedy, size))


def rules(**more: Any) -> TicketRules:
    domains = (DomainRule("lake", 1.0, 4, 4, 60.0),)
    return TicketRules(
        4, 2, 1, "wait", 0, domains, **{"pass_rate": (0.2, 0.8), "close_early": True} | more
    )


@given(st.data(), st.integers(0, 4))
def test_closings_never_exceed_the_bound_of_a_step_and_the_ledger_adds_up(
    data: st.DataObject, bound: int
) -> None:
    ledger = Ledger(rules(max_replacements_per_step=bound))
    tickets: dict[int, wire.Ticket] = {}
    by_filter = closed = 0

    def note(actions: list[Any]) -> None:
        tickets.update(
            {one.ticket.number: one.ticket for one in actions if isinstance(one, IssueTicket)}
        )

    note(ledger.open_credit())
    for seq in range(1, data.draw(st.integers(1, 40))):
        while ledger.full:
            note(ledger.complete_step())
            by_filter = 0
        if ledger.done:
            break
        if data.draw(st.booleans()):
            ledger = Ledger.load(json.loads(json.dumps(ledger.dump())))
        number = data.draw(st.sampled_from(sorted(ledger.waiting_for)))
        may_close = bool(tickets[number].pass_rate)
        assert tickets[number].pass_rate in ([], [0.2, 0.8])
        what = data.draw(st.sampled_from(["wanted", "unwanted", "dead"] + ["closed"] * may_close))
        record: Any = TicketEnd(number, "filtered" if what == "closed" else "env_error")
        if what in ("wanted", "unwanted"):
            record = GroupArrival(number, ledger.state.version, (0.0, 1.0), what == "wanted")
        actions = ledger.apply(record, seq)
        note(actions)
        outcomes = {one.number: one.outcome for one in actions if isinstance(one, ForgetTicket)}
        if what == "closed":
            assert outcomes == {number: "filtered"}
            closed += 1
        if what == "unwanted" and may_close:
            assert outcomes == {number: "filtered"}  # as it would be if it were closed early
        by_filter += list(outcomes.values()).count("filtered")
        assert by_filter <= bound
        count = ledger.counts()
        assert count["issued"] == sum(
            count[name] for name in ("trained", "filtered", "dropped", "dead", "open")
        )
        assert count["open"] <= 2 * 2
    assert ledger.state.reasons.get("filtered", 0) == closed
    if not bound:
        assert not any(ticket.pass_rate for ticket in tickets.values())


@pytest.mark.parametrize(("num_solved", "wanted"), [(0, False), (1, True), (3, True), (4, False)])
def test_a_complete_group_outside_of_the_bounds_is_filtered(num_solved: int, wanted: bool) -> None:
    ledger = Ledger(rules(close_early=False))
    ledger.open_credit()
    there = group({i: i < num_solved for i in range(4)})
    trajectories = [
        msgspec.structs.replace(one, version_runs=wire.column([0, 4], "<i4"))
        for one in there.trajectories
    ]
    there = msgspec.structs.replace(
        there, ticket=1, task_index=0, pools=[], trajectories=trajectories
    )
    read = read_record(LogRecord(1, there, "", 1, b""), ledger, 1 << 30)
    assert isinstance(read.record, GroupArrival), read
    assert read.record.passes_filters is wanted
    ledger.apply(read.record, 1)
    assert ledger.counts()["filtered"] == (not wanted)


def test_only_a_ticket_that_allows_it_counts_as_filtered_by_its_closing() -> None:
    for early, outcome in ((True, "filtered"), (False, "dead")):
        ledger = Ledger(rules(close_early=early))
        ledger.open_credit()
        forget, issue = ledger.apply(TicketEnd(1, "filtered"), 1)
        assert (forget, ledger.counts()[outcome]) == (ForgetTicket(1, outcome), 1)  # type: ignore[arg-type]
        assert isinstance(issue, IssueTicket)
        assert issue.ticket.pass_rate == ([0.2, 0.8] if early else [])


def test_tickets_say_nothing_of_filters_unless_they_may_be_closed_early() -> None:
    for changed in ({"close_early": False}, {"pass_rate": None}, {"max_replacements_per_step": 0}):
        (issue, *_) = Ledger(replace(rules(), **changed)).open_credit()
        assert isinstance(issue, IssueTicket)
        assert issue.ticket.pass_rate == []


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"pass_rate": [0.8, 0.2]},
            "algorithm.pass_rate: [0.8, 0.2] is not allowed; the lower share first",
        ),
        (
            {"close_early": True},
            "algorithm.close_early: True is not allowed; false without algorithm.pass_rate",
        ),
    ],
)
def test_bad_settings_get_one_line(settings: dict[str, Any], line: str) -> None:
    algorithm = AlgorithmSection(**settings)
    with pytest.raises(ConfigError) as caught:
        check_algorithm(RunSettings(algorithm=algorithm))
    assert line in str(caught.value)
