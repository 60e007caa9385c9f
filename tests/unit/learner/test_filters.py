"""Group filters: a function of the user's decides, the ledger replaces, at the bound what there is
gets trained.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest

from broker.contract import examples, wire
from broker.errors import ConfigError, UserError
from broker.jetstream.bus import LogRecord
from learner.algorithm.filters import FILTERS, passes_filter
from learner.credit import record_intake
from learner.credit.ledger import (
    ForgetTicket,
    GroupArrival,
    HoldGroup,
    IssueTicket,
    Ledger,
    TakeGroup,
)
from learner.credit.ticket_rules import DomainRule, TicketRules


def group(*successes: bool, ticket: int = 1) -> wire.Group:
    example = next(one for one in examples.EXAMPLES.values() if isinstance(one, wire.Group))
    base = example.trajectories[0]
    return msgspec.structs.replace(
        example,
        ticket=ticket,
        trajectories=[
            msgspec.structs.replace(base, episode=i, success=success, greedy=False)
            for i, success in enumerate(successes)
        ],
    )


@pytest.mark.parametrize(
    ("successes", "wanted"),
    [((True, False), True), ((True, True), False), ((False, False), False), ((True,), False)],
)
def test_mixed_success(successes: tuple[bool, ...], wanted: bool) -> None:
    assert passes_filter("mixed_success", group(*successes)) is wanted


@pytest.mark.parametrize("name", FILTERS)
def test_every_filter_answers_yes_or_no(name: str) -> None:
    assert passes_filter(name, group(True, False)) in (True, False)


def test_without_a_name_all_are_wanted() -> None:
    assert passes_filter("", group(False)) is True


def write(folder: Path, body: str) -> str:
    file = folder / "mine.py"
    file.write_text(f"def keep(group):\n    {body}\n")
    return f"{file}:keep"


def test_a_function_of_the_users_decides_and_the_ledger_replaces_up_to_the_bound(
    tmp_path: Path,
) -> None:
    name = write(tmp_path, "return group.ticket % 2 == 0")
    rules = TicketRules(
        2,
        1,
        0,
        "wait",
        0,
        (DomainRule("lake", 1.0, 2, 2, 60.0),),
        group_filter=name,
        max_replacements_per_step=2,
    )
    ledger = Ledger(rules)
    ledger.open_credit()
    vocab_size = 1 << 30

    def arrive(number: int) -> list[object]:
        ticket = ledger.ticket(number)
        there = msgspec.structs.replace(
            group(True, False, ticket=number),
            domain="lake",
            task_index=ticket.task_index,
            policy="actor",
            pools=[],
        )
        there = msgspec.structs.replace(
            there,
            eval_step=-1,
            trajectories=[
                msgspec.structs.replace(one, version_runs=wire.column([0, 1], "<i4"))
                for one in there.trajectories
            ],
        )
        read = record_intake.read_record(
            LogRecord(ledger.state.position + 1, there, "", number, b""), ledger, vocab_size
        )
        assert isinstance(read.record, GroupArrival), read
        assert read.record.passes_filters is (number % 2 == 0)
        return list(
            ledger.apply(
                dataclasses.replace(read.record, oldest_version=ledger.state.version),
                ledger.state.position + 1,
            )
        )

    filtered = arrive(1)
    assert filtered[0] == ForgetTicket(1, "filtered")
    assert isinstance(filtered[1], IssueTicket)
    assert filtered[1].ticket.number == 2
    assert arrive(2) == [HoldGroup(2), TakeGroup(2)]
    ledger.complete_step()
    assert ledger.counts() == {
        "issued": 3, "trained": 1, "filtered": 1, "dropped": 0, "dead": 0, "open": 1, "duplicate": 0, "unknown": 0
    }  # fmt: skip


def test_at_the_bound_an_unwanted_group_is_trained() -> None:
    rules = TicketRules(
        1,
        1,
        0,
        "wait",
        0,
        (DomainRule("lake", 1.0, 2, 2, 60.0),),
        group_filter="mixed_success",
        max_replacements_per_step=1,
    )
    ledger = Ledger(rules)
    ledger.open_credit()
    assert ledger.apply(GroupArrival(1, 0, (1.0, 1.0), passes_filters=False), 1)[0] == ForgetTicket(
        1, "filtered"
    )
    assert ledger.apply(GroupArrival(2, 0, (1.0, 1.0), passes_filters=False), 2) == [
        HoldGroup(2),
        TakeGroup(2),
    ]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("raise KeyError('x')", "keep raised KeyError for the group of ticket 7: 'x'"),
        (
            "return 1.0",
            "keep returned 1.0 for the group of ticket 7; True keeps it, False filters it",
        ),
    ],
)
def test_a_filter_that_fails_stops_the_learner_with_its_name_and_the_ticket(
    tmp_path: Path, body: str, says: str
) -> None:
    with pytest.raises(UserError, match="algorithm") as caught:
        passes_filter(write(tmp_path, body), group(True, ticket=7))
    assert says in str(caught.value)


def test_an_unknown_filter_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="mixed_success"):
        passes_filter("mixd_success", group(True))
