"""Learners with a curriculum that are killed (SIGKILL): the same tickets, whatever the moment."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest
import yaml

from bench import resume
from broker.contract import wire
from learner.credit import archive, ledger_segments
from learner.credit.ledger import Action, IssueTicket, Ledger, RulesUpdate
from learner.credit.pass_rate_file import FILE, read_pass_rates
from learner.credit.record_intake import read_record, rules_change
from learner.credit.task_pool import rates_of
from rlearner.cli import main

STEPS = 12
NUM_TASKS = 20
CURRICULUM = {
    "tasks": NUM_TASKS,
    "explore": 0.1,
    "stages": [{"from_step": 4, "band": [0.3, 0.7]}],
}
VOCABULARY = 1000


@pytest.fixture(scope="module")
def played() -> dict[int, set[tuple[int, int]]]:
    """(task, seed) of each ticket that the hub was given, by number; filled by ``killed``."""
    return {}


@pytest.fixture(scope="module")
def killed(
    tmp_path_factory: pytest.TempPathFactory, played: dict[int, set[tuple[int, int]]]
) -> Path:
    """The folder of a run with a curriculum whose learner was killed twice."""
    folder = tmp_path_factory.mktemp("killed")
    make_group = resume.group

    def noted_group(ticket: wire.Ticket, rng: random.Random) -> wire.Group:
        played.setdefault(ticket.number, set()).add((ticket.task_index, ticket.seed))
        return make_group(ticket, rng)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resume, "group", noted_group)
        disturbed = resume.disturbed(folder, STEPS, 2, seed=5, domain={"curriculum": CURRICULUM})
        assert asyncio.run(disturbed) == 2
    return folder / "runs" / resume.RUN


def reread(run: Path) -> tuple[Ledger, list[wire.Ticket]]:
    """Return the ledger that reads the run's archive without a stop, and its tickets."""
    records = [frame.record() for frame in archive.read_frames(run / archive.FOLDER)]
    first = records[0].message
    assert isinstance(first, wire.RulesChange)
    rules = rules_change(first).record
    assert isinstance(rules, RulesUpdate)
    ledger = Ledger(rules.rules)
    tickets: list[wire.Ticket] = []

    def note(actions: list[Action]) -> None:
        tickets.extend(action.ticket for action in actions if isinstance(action, IssueTicket))

    note(ledger.open_credit())
    for record in records:
        note(ledger.apply(read_record(record, ledger, VOCABULARY).record, record.seq))
        while ledger.full:
            note(ledger.complete_step())
    return ledger, tickets


def test_killed_learner_issues_the_same_tickets(
    killed: Path, played: dict[int, set[tuple[int, int]]]
) -> None:
    """The log, read once without a stop, gives the tickets that hubs were given and files name."""
    ledger, tickets = reread(killed)
    assert ledger.done
    issued = {ticket.number: (ticket.task_index, ticket.seed) for ticket in tickets}
    assert {number: {issued[number]} for number in played} == played
    lines, _ = ledger_segments.read_newest(killed / ledger_segments.FOLDER)
    noted = {line.ticket: line.task_index for line in lines if line.state == "issued"}
    assert noted == {ticket.number: ticket.task_index for ticket in tickets}
    # Tasks come back, and they are those of the curriculum.
    tasks = [ticket.task_index for ticket in tickets]
    assert set(tasks) <= set(range(NUM_TASKS))
    assert len(set(tasks)) < len(tasks)


def test_pass_rates_are_kept_for_later_runs(killed: Path) -> None:
    ledger, _ = reread(killed)
    rates = rates_of(ledger.state.pools["lake"].levels)
    measured = sorted(round(float(rate), 4) for rate in rates if rate == rate)
    assert measured
    assert sorted(read_pass_rates(str(killed), "key").values()) == measured
    header = json.loads((killed / FILE).read_text().splitlines()[0])
    assert (header["run"], header["model"]) == (resume.RUN, "the model of model.tiny")


def test_metrics_tell_the_curriculum(killed: Path) -> None:
    rows = [json.loads(line) for line in (killed / "metrics.jsonl").read_text().splitlines()]
    shares = [row["curriculum/lake/measured"] for row in rows]
    assert shares == sorted(shares)
    assert 0 < shares[0] < shares[-1] <= 1
    assert 0 <= rows[-1]["curriculum/lake/in_band"] <= 1


def test_other_run_begins_with_the_pass_rates(
    killed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same model may use them; another one is refused in one line."""
    file = tmp_path / "run.yaml"
    config = yaml.safe_load((killed / "config.yaml").read_text())
    config["run"] = {"name": "later", "dir": str(tmp_path)}
    config["domains"]["lake"]["curriculum"]["pass_rates"] = str(killed)
    file.write_text(yaml.safe_dump(config))
    assert main(["check", str(file)]) == 0
    capsys.readouterr()
    assert main(["check", str(file), "model.seed=9"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: domains.lake.curriculum.pass_rates: ")
    assert "pass rates of this run's model" in error
    assert error.count("\n") == 1
