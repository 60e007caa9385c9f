"""The tasks that a learner finds for its ledger."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from broker.settings.run_settings import RunSettings
from broker.settings.runspec import check_settings
from learner.credit.ledger import GroupArrival, IssueTicket, Ledger
from learner.credit.pass_rate_file import FILE, read_pass_rates
from learner.credit.task_pool import Stage, TaskPart, decode_levels
from learner.credit.task_sources import TaskSources
from learner.credit.ticket_rules import rules_of


def write_rows(path: Path, rows: list[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def numbered(first: int, last: int) -> list[dict[str, str]]:
    return [{"question": f"q{n}", "answer": f"a{n}"} for n in range(first, last)]


def settings_of(path: str, **domain: Any) -> RunSettings:
    env_args = {"path": path, "eval_share": 0, **domain.pop("env_args", {})}
    section = {"env": "qa", "env_args": env_args, "rewards": [{"name": "math_answer"}], **domain}
    return check_settings(
        {"run": {"name": "quick"}, "domains": {"math": section}, "eval": {"every_steps": 0}}
    )


def ledger_of(settings: RunSettings, sources: TaskSources) -> Ledger:
    return Ledger(rules_of(settings.train, settings.algorithm, settings.domains, 0, sources.rules))


def test_domain_without_a_choice_has_no_tasks(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", numbered(0, 4))
    assert TaskSources(settings_of(path)).rules == {}


def test_files_with_weights_are_parts(tmp_path: Path) -> None:
    write_rows(tmp_path / "easy.jsonl", numbered(0, 4))
    write_rows(tmp_path / "hard.jsonl", numbered(4, 10))
    files = [{"file": "hard.jsonl", "weight": 3}, {"file": "easy.jsonl"}]
    rules = TaskSources(settings_of(str(tmp_path), env_args={"files": files})).rules
    assert rules["math"].parts == (TaskPart(6, 3.0), TaskPart(4, 1.0))
    assert rules["math"].curriculum is None


def test_pass_rates_of_an_earlier_run_fill_its_tasks(tmp_path: Path) -> None:
    """Rows are found again by what they hold, in whatever order another run has them."""
    path = write_rows(tmp_path / "a.jsonl", numbered(0, 6))
    section = {"band": [0.1, 0.9], "stages": [{"from_step": 5, "band": [0.2, 0.5]}]}
    settings = settings_of(path, curriculum=section)
    sources = TaskSources(settings)
    curriculum = sources.rules["math"].curriculum
    assert curriculum is not None
    assert curriculum.stages == (Stage(0, 0.1, 0.9), Stage(5, 0.2, 0.5))
    ledger = ledger_of(settings, sources)
    tickets = [a.ticket for a in ledger.open_credit() if isinstance(a, IssueTicket)]
    for seq, successes in enumerate((0, 4, 8), start=1):
        record = GroupArrival(tickets[seq - 1].number, 0, (0.0, 1.0), True, successes, 8)
        ledger.apply(record, seq)
    sources.store_pass_rates(tmp_path, json.loads(json.dumps(ledger.dump())))
    assert sorted(read_pass_rates(str(tmp_path), "key").values()) == [0.0, 0.5, 1.0]
    measured = {tickets[place].task_index: level for place, level in enumerate((0, 125, 250))}
    # Another order of the same rows, and one row more.
    other = write_rows(tmp_path / "b.jsonl", [*numbered(0, 7)][::-1])
    again = settings_of(
        other,
        env_args={"shuffle_seed": 5},
        curriculum={"pass_rates": str(tmp_path / FILE)},
    )
    rule = TaskSources(again).rules["math"]
    assert rule.curriculum is not None
    levels = decode_levels(rule.curriculum.initial)
    assert len(levels) == 7
    assert sorted(levels) == sorted([0, 125, 250, 255, 255, 255, 255])
    old_questions, new_questions = (
        {task: question_of(each, task) for task in range(count)}
        for each, count in ((settings, 6), (again, 7))
    )
    by_question = {old_questions[task]: level for task, level in measured.items()}
    for task, level in enumerate(levels):
        assert level == by_question.get(new_questions[task], 255)


def question_of(settings: RunSettings, task: int) -> str:
    from envhub.domain import load_domains

    environment: Any = load_domains(settings)["math"].make()
    return str(environment.reset(task, "train", 0).text)


def test_generated_tasks_are_known_by_what_makes_them() -> None:
    def keys(**changes: Any) -> str:
        lake = {"env": "frozenlake", "curriculum": {"tasks": 5}, **changes.pop("lake", {})}
        config = {"domains": {"lake": lake}, "eval": {"every_steps": 0}, **changes}
        return TaskSources(check_settings(config)).rules["lake"].digest

    assert keys() == keys()
    assert keys() != keys(run={"seed": 1})
    assert keys() != keys(lake={"env_args": {"size": 5}})
