"""Domains that are only evaluated, and those that an evaluation measures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_folder_kit import group as ended_group

from broker.contract import wire
from broker.errors import ConfigError
from broker.settings.config import DomainSection
from broker.settings.run_settings import RunSettings, check_domains
from broker.settings.timeouts import derive
from envhub.config import num_eval_tasks
from envhub.demos import pick_domain
from learner.algorithm_checks import check_algorithm
from learner.config import AlgorithmSection, EvalSection, TrainSection
from learner.credit.capacity import capacity_notes, check_groups
from learner.credit.ledger import Ledger, RulesUpdate
from learner.credit.ticket_rules import next_domain, rules_of
from learner.evaluation.evaluation import Evaluation, EvaluationQueue
from learner.evaluation.task_results import domain_figures
from learner.reporting.transcripts import Transcript
from learner.resume_checks import _refuse_domains
from rlearner.evaluate.tasks import task_counts

WEIGHTS = st.dictionaries(
    st.sampled_from("abcde"), st.sampled_from([0, 0, 0.5, 1, 3]), min_size=1
).filter(lambda weights: any(weights.values()))


def lake(**section: Any) -> dict[str, Any]:
    return {"env": "frozenlake", "deadline_s": 9, **section}


def transfer(**section: Any) -> dict[str, DomainSection]:
    sokoban = {"env": "sokoban", "deadline_s": 9, "weight": 0, **section}
    return {"lake": DomainSection(**lake()), "sokoban": DomainSection.model_validate(sokoban)}


def config(**changes: Any) -> RunSettings:
    values = {"domains": {"lake": lake(), "sokoban": lake(env="sokoban", weight=0)}}
    return RunSettings.of_config(values | {"eval": {"every_steps": 5}} | changes)


# ------------------------------------------------------------------------------------------------
# training tickets


@given(WEIGHTS, st.integers(1, 60))
@settings(max_examples=100, deadline=None)
def test_a_domain_of_weight_0_gets_no_ticket_and_counts_in_no_share(
    weights: dict[str, float], num_tickets: int
) -> None:
    sections = {name: DomainSection(**lake(weight=weight)) for name, weight in weights.items()}
    trained = {name: section for name, section in sections.items() if section.weight}
    rules = rules_of(TrainSection(), AlgorithmSection(), sections, 0)
    assert rules == rules_of(TrainSection(), AlgorithmSection(), trained, 0)
    issued = dict.fromkeys(trained, 0)
    for _ in range(num_tickets):
        issued[next_domain(rules.domains, issued)] += 1
    total = sum(weights.values())
    for name, count in issued.items():
        assert abs(count - num_tickets * weights[name] / total) <= max(1, len(trained) - 1)


def test_tickets_of_a_domain_are_replaced_when_its_weight_becomes_0() -> None:
    both = {"lake": DomainSection(**lake()), "sokoban": DomainSection(**lake(env="sokoban"))}
    train = TrainSection(steps=4, groups_per_step=4, max_staleness=0)
    ledger = Ledger(rules_of(train, AlgorithmSection(), both, 0))
    ledger.open_credit()
    assert sorted(ticket.domain for ticket in ledger.state.live.values()) == [
        *("lake", "lake", "sokoban", "sokoban")
    ]
    ledger.apply(RulesUpdate(rules_of(train, AlgorithmSection(), transfer(), 0), 1), 1)
    assert [ticket.domain for ticket in ledger.state.live.values()] == ["lake"] * 4
    assert ledger.counts()["dropped"] == 2


# ------------------------------------------------------------------------------------------------
# evaluation tickets


def queue(section: EvalSection, domains: dict[str, DomainSection], first: int) -> EvaluationQueue:
    return EvaluationQueue(section, domains, seed=3, first_number=first)


def test_each_domain_is_evaluated_as_it_says() -> None:
    section = EvalSection(tasks=3, temperature=0.5)
    domains = transfer(eval={"tasks": 1, "group_size": 4, "temperature": 0.0})
    tickets = queue(section, domains, 11).start(0, "actor", 0, 0.0)
    shapes = [(t.number, t.domain, t.task_index, t.group_size, t.temperature) for t in tickets]
    assert shapes == [
        (11, "lake", 0, 1, 0.5),
        (12, "sokoban", 0, 4, 0.0),
        (13, "lake", 1, 1, 0.5),
        (14, "lake", 2, 1, 0.5),
    ]


def test_only_the_named_domains_are_evaluated() -> None:
    section = EvalSection(tasks=2, domains=["sokoban"])
    tickets = queue(section, transfer(), 1).start(0, "actor", 0, 0.0)
    assert [(t.domain, t.task_index) for t in tickets] == [("sokoban", 0), ("sokoban", 1)]


OWN_VALUES = st.fixed_dictionaries(
    {},
    optional={
        "tasks": st.integers(1, 5),
        "group_size": st.integers(1, 4),
        "temperature": st.sampled_from([0.0, 1.0]),
    },
)


@given(st.dictionaries(st.sampled_from("abcd"), OWN_VALUES, min_size=1), st.data())
@settings(max_examples=100, deadline=None)
def test_a_domains_tasks_depend_on_no_restart_and_no_other_domain(
    own: dict[str, dict[str, Any]], data: st.DataObject
) -> None:
    sections = {name: DomainSection(**lake(eval=values)) for name, values in own.items()}
    name = data.draw(st.sampled_from(sorted(own)))
    section = EvalSection(tasks=2)

    def tasks(evaluations: EvaluationQueue, step: int) -> list[tuple[Any, ...]]:
        return [
            (ticket.task_index, ticket.seed, ticket.group_size, ticket.temperature)
            for ticket in evaluations.start(step, "actor", step, 0.0)
            if ticket.domain == name
        ]

    first = queue(section, sections, 1)
    expected = tasks(first, 0)
    assert [task[0] for task in expected] == list(range(own[name].get("tasks", 2)))
    assert tasks(first, 10) == expected
    restarted = queue(section, sections, data.draw(st.integers(1, 1000)))
    assert tasks(restarted, 10) == expected
    alone = section.model_copy(update={"domains": [name]})
    assert tasks(queue(alone, sections, 1), 10) == expected


# ------------------------------------------------------------------------------------------------
# figures


def episode(
    number: int, reward: float, lengths: list[int], *, cut: bool = False
) -> wire.Trajectory:
    ticket = wire.Ticket(
        number=1, domain="lake", task_index=0, seed=1, min_version=0, max_staleness=0,
        group_size=2, min_group_size=1, deadline_s=9.0,
    )  # fmt: skip
    trajectory = ended_group(ticket, eval_step=0).trajectories[0]
    turns = []
    start = 2
    for length in lengths:
        turns.append(
            wire.Turn(
                start=start, end=start + length, reward=0.0, valid=True, server="s",
                finish_reason="length" if cut else "stop",
            )
        )  # fmt: skip
        start += length
    replaced: dict[str, Any] = {"episode": number, "reward": reward, "success": reward > 0}
    return wire.msgspec.structs.replace(trajectory, turns=turns, **replaced)


def evaluation() -> Evaluation:
    """Two tasks of lake with two episodes each, one of sokoban with one."""
    result = Evaluation(10, "actor", set(), 0.0)
    tasks = [
        ("lake", 0, [episode(0, 1.0, [3, 2]), episode(1, 0.0, [10], cut=True)]),
        ("lake", 1, [episode(0, 0.0, [1]), episode(1, 3.0, [2, 2, 2])]),
        ("sokoban", 0, [episode(0, -0.5, [7])]),
    ]
    for domain, index, episodes in tasks:
        group = wire.Group(
            ticket=1, domain=domain, task_index=index, min_version=0, hub="h", deliveries=1,
            pools=[], trajectories=episodes, eval_step=10,
        )  # fmt: skip
        result.add(group)
    return result


LAKE_FIGURES = {
    "success_rate": 0.5,
    "reward_mean": 1.0,
    "reward_p10": 0.0,
    "reward_p50": 0.5,
    "reward_p90": 2.4,
    "episode_tokens_mean": 5.5,
    "episode_tokens_p10": 2.2,
    "episode_tokens_p50": 5.5,
    "episode_tokens_p90": 8.8,
    "num_turns": 1.75,
    "clip_ratio": 0.25,
    "avg@2": 0.5,
    "pass@1": 0.5,
    "pass@2": 1.0,
}


def figures_of(result: Evaluation, domain: str) -> dict[str, float]:
    prefix = f"eval/domain/{domain}/"
    values = result.values()
    return {name[len(prefix) :]: values[name] for name in values if name.startswith(prefix)}


def test_figures_of_each_domain_by_hand() -> None:
    assert figures_of(evaluation(), "lake") == pytest.approx(LAKE_FIGURES)
    sokoban = figures_of(evaluation(), "sokoban")
    assert sokoban["reward_p10"] == sokoban["reward_p90"] == -0.5
    assert (sokoban["episode_tokens_p90"], sokoban["num_turns"], sokoban["clip_ratio"]) == (7, 1, 0)
    assert "pass@1" not in sokoban


def test_turns_that_are_samples_of_their_own_are_one_episode() -> None:
    result = Evaluation(0, "actor", set(), 0.0)
    cut = [episode(0, 0.0, [3]), episode(0, 1.0, [4])]
    group = wire.Group(
        ticket=1, domain="lake", task_index=0, min_version=0, hub="h", deliveries=1, pools=[],
        trajectories=cut, eval_step=0,
    )  # fmt: skip
    result.add(group)
    figures = domain_figures(result.measured)
    assert (figures["episode_tokens_mean"], figures["num_turns"]) == (7.0, 2.0)


def test_figures_survive_a_restart() -> None:
    result = evaluation()
    plain = [row.plain(Transcript("p", "t", 1.0, success=True)) for row in result.rows]
    rows = json.loads(json.dumps(plain))
    evaluations = queue(EvalSection(tasks=2), transfer(eval={"tasks": 1}), 1)
    assert evaluations.restore(10, "actor", rows).values() == result.values()
    for row in rows:
        for name in ("tokens", "turns", "cut"):  # as an earlier version has written it
            del row[name]
    old = figures_of(evaluations.restore(10, "actor", rows), "lake")
    missing = {name for name in LAKE_FIGURES if name.startswith("episode_tokens")}
    assert set(old) == set(LAKE_FIGURES) - missing - {"num_turns", "clip_ratio"}


# ------------------------------------------------------------------------------------------------
# settings


NO_TRAINING = {"lake": lake(weight=0), "sokoban": lake(env="sokoban", weight=0)}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"domains": NO_TRAINING},
            "domains.lake.weight: 0 is not allowed; above 0 in one domain at least; with 0 a "
            "domain is only evaluated",
        ),
        (
            {"eval": {"every_steps": 5, "domains": ["lake", "sokobann"]}},
            "eval.domains: ['lake', 'sokobann'] is not allowed; names of domains, each once: lake, "
            "sokoban",
        ),
        (
            {"eval": {"every_steps": 5, "domains": ["lake", "sokoban", "lake"]}},
            "eval.domains: ['lake', 'sokoban', 'lake'] is not allowed; names of domains, each once:"
            " lake, sokoban",
        ),
        (
            {"eval": {"every_steps": 5, "domains": ["lake"]}},
            "domains.sokoban.weight: 0 is not allowed; above 0, or name it in eval.domains: with 0 "
            "a domain is only evaluated",
        ),
        (
            {"eval": {}},
            "domains.sokoban.weight: 0 is not allowed; above 0 without eval.every_steps: with 0 a "
            "domain is only evaluated",
        ),
    ],
)
def test_domains_that_are_never_used_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_domains(config(**changes))
    assert str(error.value) == problem


def test_domains_that_evaluations_use_pass() -> None:
    check_domains(config())
    check_domains(config(eval={"tasks": 4}))  # `rlearner eval-now` alone
    named = config(eval={"every_steps": 5, "domains": ["sokoban"]})
    check_domains(named)
    assert list(named.evaluated_domains) == ["sokoban"]
    assert list(named.trained_domains) == ["lake"]


def test_only_trained_domains_need_groups_to_compare() -> None:
    check_algorithm(config(domains={"lake": lake(), "s": lake(weight=0, group_size=1)}))
    with pytest.raises(ConfigError, match=r"domains\.s\.group_size: 1 is not allowed"):
        check_algorithm(config(domains={"lake": lake(), "s": lake(group_size=1)}))


def test_demonstrations_are_of_the_only_trained_domain() -> None:
    assert pick_domain(config(), None).name == "lake"
    assert pick_domain(config(), "sokoban").name == "sokoban"


def test_tasks_are_counted_in_evaluated_domains_alone(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1 + 1", "answer": "2"}\n' * 3)
    sums = {"env": "qa", "env_args": {"path": str(rows), "eval_path": str(rows)}}

    def count(own_tasks: int | None = None, **section: Any) -> int:
        domains = {"lake": lake(), "sums": {**sums, "eval": {"tasks": own_tasks}}}
        return num_eval_tasks(config(domains=domains, eval={"every_steps": 5, **section}))

    assert count() == 3
    assert count(domains=["lake"]) == 256
    assert count(domains=["lake"], tasks=9) == 9
    assert count(own_tasks=2) == 256  # of lake
    with pytest.raises(ConfigError, match=r"eval.tasks: 9 .* at most 3, the held-out tasks of"):
        count(tasks=9)
    with pytest.raises(ConfigError, match=r"domains.sums.eval.tasks: 4 .* at most 3, the held-out"):
        count(own_tasks=4)


def test_time_and_room_of_a_domain_of_weight_0_follow_its_evaluation() -> None:
    sokoban = {"env": "sokoban", "weight": 0, "group_size": 64}
    domains = {"lake": lake(), "sokoban": sokoban | {"eval": {"group_size": 2}}}
    settings = config(domains=domains, envhub={"n": 2})
    alike = {"lake": lake(), "sokoban": {"env": "sokoban", "group_size": 2}}
    derived = derive(settings, {}).domains["sokoban"].deadline_s
    assert (
        derived == derive(config(domains=alike, envhub={"n": 2}), {}).domains["sokoban"].deadline_s
    )
    # 16 groups of 8 episodes with 4,096 tokens of 13 bytes, one turn of 128, and 512; 1,024 each.
    lines = capacity_notes(settings)
    assert lines[1].startswith("domains.sokoban: a group takes at most")
    assert "2 episodes of 4,096 tokens" in lines[1]
    assert lines[2].startswith("a step takes at most 6.59 MiB")


def test_evaluated_groups_must_fit_a_message() -> None:
    large = {"eval": {"group_size": 1_000_000}}
    with pytest.raises(
        ConfigError, match=r"domains\.lake\.max_context_tokens: 4096 .*1000000 epis"
    ):
        check_groups(config(domains={"lake": lake(**large)}, eval={"every_steps": 5}))
    check_groups(config(domains={"lake": lake(**large), "sea": lake()}, eval={"domains": ["sea"]}))


def test_a_run_does_not_continue_with_none_of_the_domains_that_it_trained() -> None:
    """Without --force; that all of its domains are still evaluated does not count."""
    old_config = config().to_plain()
    swapped = {"lake": lake(weight=0), "sokoban": lake(env="sokoban")}
    with pytest.raises(ConfigError, match=r"domains: 'sokoban' .* has trained lake: keep one of"):
        _refuse_domains(old_config, config(domains=swapped), force=False)
    _refuse_domains(old_config, config(domains=swapped), force=True)
    both = {"lake": lake(), "sokoban": lake(env="sokoban")}
    _refuse_domains(old_config, config(domains=both), force=False)


def test_the_eval_command_measures_what_a_run_would() -> None:
    domains = {"lake": lake(), "sokoban": lake(env="sokoban", weight=0, eval={"tasks": 3})}
    settings = config(domains=domains, eval={"tasks": 5})
    assert task_counts(settings, {}) == {"lake": 5, "sokoban": 3}
    alone = settings.with_values("eval", domains=["sokoban"])
    assert task_counts(alone, {}) == {"sokoban": 3}
