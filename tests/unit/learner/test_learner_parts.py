"""What surrounds the ledger, without a network: reading records, evaluation, ageing tickets, the
training thread.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest

from broker.contract import wire
from broker.jetstream.bus import LogRecord
from broker.settings.config import DomainSection
from learner.algorithm.packing import MicroBatchCutter
from learner.algorithm.samples import SampleScores, TrainSample
from learner.config import AlgorithmSection, CriticSection, EvalSection
from learner.credit import record_intake
from learner.credit.ledger import GroupArrival, Ledger, TicketEnd
from learner.credit.ticket_rules import DomainRule, TicketRules
from learner.credit.tickets import TicketAges
from learner.evaluation.evaluation import EvaluationQueue
from learner.training import TrainingThread


def trajectory(
    episode: int = 0, reward: float = 1.0, runs: tuple[int, ...] = (0, 2), token: int = 7
) -> wire.Trajectory:
    sampled = sum(runs[1::2])
    return wire.Trajectory(
        episode=episode,
        token_ids=wire.column([3, token] + [4] * sampled, "<i4"),
        loss_mask=wire.column([0, 0] + [1] * sampled, "|u1"),
        logprobs=wire.column([0.0, 0.0] + [-1.0] * sampled, "<f4"),
        version_runs=wire.column(runs, "<i4"),
        turns=[
            wire.Turn(
                start=2,
                end=2 + sampled,
                reward=reward,
                valid=True,
                finish_reason="stop",
                server="s",
            )
        ]
        if sampled
        else [],
        reward=reward,
        reward_parts={},
        success=reward > 0,
        end="terminated",
    )


def group(trajectories: list[wire.Trajectory] | None = None, **more: Any) -> wire.Group:
    given: dict[str, Any] = {
        "ticket": 1,
        "domain": "lake",
        "task_index": 0,
        "min_version": 0,
        "hub": "h",
        "deliveries": 1,
        "pools": [],
    }
    return wire.Group(
        **{**given, **more}, trajectories=trajectories or [trajectory(0), trajectory(1)]
    )


def a_ledger(**more: Any) -> Ledger:
    given: dict[str, Any] = {
        "steps": 4,
        "groups_per_step": 2,
        "max_staleness": 1,
        "on_late": "wait",
        "seed": 0,
    }
    ledger = Ledger(TicketRules(**{**given, **more}, domains=(DomainRule("lake", 1.0, 2, 2, 1.0),)))
    ledger.open_credit()
    return ledger


def record(message: wire.Message | None, *, ticket: int = 0, error: str = "") -> LogRecord:
    return LogRecord(seq=1, message=message, error=error, ticket=ticket, data=b"")


# -------------------------------------------------------------------------------------------------------
# intake


def test_a_good_group() -> None:
    good = group([trajectory(0, 1.0, (0, 2)), trajectory(1, -0.5, (0, 1, 0, 3))])
    assert record_intake.read_record(record(good), a_ledger(), 100) == record_intake.RecordIntake(
        GroupArrival(1, 0, (1.0, -0.5), successes=1, episodes=2), good
    )


def test_a_closing() -> None:
    closed = wire.Closed(ticket=3, domain="lake", reason="late", detail="", by="h")
    assert record_intake.read_record(record(closed), a_ledger(), 100) == record_intake.RecordIntake(
        TicketEnd(3, "late")
    )


def test_bytes_that_do_not_decode_end_the_ticket_in_the_header() -> None:
    read = record_intake.read_record(record(None, ticket=2, error="truncated"), a_ledger(), 100)
    assert read == record_intake.RecordIntake(TicketEnd(2, "malformed"), problem="truncated")


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (group(pools=["judge"]), "never scored by pool judge"),
        (group(eval_step=3), "belongs to an evaluation"),
        (group(policy="random"), "policy random"),
        (group(domain="sea"), "asked for lake task 0, not sea task 0"),
        (group(task_index=4), "asked for lake task 0, not lake task 4"),
        (group([trajectory()]), "1 of the 2 episodes of ticket 1, which needs at least 2"),
        # two samples of one episode
        (
            group([trajectory(), trajectory()]),
            "1 of the 2 episodes of ticket 1, which needs at least 2",
        ),
        (
            group([trajectory(token=100), trajectory(1)]),
            "token id 100 of episode 0, the vocabulary has 100",
        ),
        (
            group([trajectory(runs=(0, 1, 1, 1)), trajectory(1)]),
            "a token of policy version 1 while 0 is being trained",
        ),
    ],
)
def test_a_group_that_cannot_be_trained_on(bad: wire.Group, problem: str) -> None:
    read = record_intake.read_record(record(bad), a_ledger(), 100)
    assert read.record == TicketEnd(1, "malformed")
    assert read.group is None
    assert problem in read.problem


def test_a_group_without_sampled_tokens_is_as_new_as_can_be() -> None:
    nothing = [trajectory(episode, runs=()) for episode in (0, 1)]
    assert record_intake.read_record(
        record(group(nothing)), a_ledger(), 100
    ).record == GroupArrival(1, 0, (1.0, 1.0), successes=2, episodes=2)


# ---------------------------------------------------------------------------------------------------
# evaluation


def evaluations(**more: Any) -> EvaluationQueue:
    domains = {
        "sea": DomainSection(env="x", deadline_s=5),
        "lake": DomainSection(env="x", deadline_s=9),
    }
    return EvaluationQueue(
        EvalSection(every_steps=10, tasks=2, temperature=0.5, **more),
        domains,
        seed=1,
        first_number=11,
    )


def test_the_same_tasks_every_time() -> None:
    ev = evaluations()
    first, second = ev.start(0, "actor", 0, 0.0), ev.start(10, "actor", 10, 0.0)
    assert [(t.number, t.domain, t.task_index, t.deadline_s) for t in first] == [
        (11, "lake", 0, 9), (12, "sea", 0, 5), (13, "lake", 1, 9), (14, "sea", 1, 5),
    ]  # fmt: skip
    assert [t.number for t in second] == [15, 16, 17, 18]
    assert [(t.domain, t.task_index, t.seed) for t in first] == [
        (t.domain, t.task_index, t.seed) for t in second
    ]
    assert {(t.eval_step, t.policy, t.min_version, t.temperature) for t in second} == {
        (10, "actor", 10, 0.5)
    }


def test_each_domain_may_have_its_own_number_of_tasks() -> None:
    domains = {
        "sea": DomainSection(env="x", deadline_s=5),
        "lake": DomainSection(env="x", deadline_s=9),
    }
    ev = EvaluationQueue(EvalSection(tasks=9), domains, seed=1, num_tasks={"sea": 3, "lake": 1})
    assert [(t.number, t.domain, t.task_index) for t in ev.start(0, "actor", 0, 0.0)] == [
        (1, "lake", 0), (2, "sea", 0), (3, "sea", 1), (4, "sea", 2),
    ]  # fmt: skip


def test_when_it_is_due() -> None:
    assert [step for step in range(26) if evaluations().due(step, 25)] == [0, 10, 20, 25]
    assert [step for step in range(26) if evaluations(at_start=False).due(step, 25)] == [10, 20, 25]
    off = EvaluationQueue(EvalSection(), {}, seed=1)
    assert not any(off.due(step, 25) for step in range(26))


def test_results_by_hand() -> None:
    ev = evaluations(group_size=2)
    ev.start(10, "actor", 10, 0.0)
    both = [trajectory(0, 1.0, (10, 2)), trajectory(1, 0.0, (10, 1, 12, 1))]
    assert ev.apply(group(both, ticket=11, domain="lake", eval_step=10)) is None
    assert ev.apply(group(both, ticket=11, domain="lake", eval_step=10)) is None  # a duplicate
    assert ev.apply(group(both, ticket=99, domain="lake", eval_step=10)) is None  # a stranger
    assert (
        ev.apply(group([trajectory(0, 4.0, (11, 1))], ticket=12, domain="sea", eval_step=10))
        is None
    )
    assert (
        ev.apply(
            wire.Closed(
                ticket=13, domain="lake", reason="deadline", detail="", by="h", eval_step=10
            )
        )
        is None
    )
    done = ev.apply(
        wire.Closed(ticket=14, domain="sea", reason="deadline", detail="", by="h", eval_step=10)
    )
    assert done is not None
    assert done.closed == {"deadline": 2}
    values = done.values()
    of_domains = [name for name in values if name.startswith("eval/domain/")]
    rates = [name for name in of_domains if name.endswith("success_rate")]
    kept = [name for name in values if name not in of_domains or name in rates]
    assert {name: values[name] for name in kept} == pytest.approx(
        {
            "eval/success_rate": 2 / 3,
            "eval/reward_mean": 5 / 3,
            "eval/policy_version_min": 10,
            "eval/policy_version_max": 12,
            "eval/step": 10,
            "eval/num_episodes": 3,
            "eval/num_closed": 2,
            "eval/avg@2": 0.5,  # of the task that has both its episodes
            "eval/pass@1": 0.5,
            "eval/pass@2": 1.0,
            "eval/domain/lake/success_rate": 0.5,
            "eval/domain/sea/success_rate": 1.0,
        }
    )
    assert ev.pending == []


def test_a_baseline_and_an_evaluation_that_takes_too_long() -> None:
    ev = evaluations(timeout_s=100.0)
    ev.start(0, "random", 0, 5.0)
    ev.apply(group([trajectory(0, 0.0, (0, 1))], ticket=11, eval_step=0, policy="random"))
    assert ev.expire(104.9) == []  # a result arrived: the time counts from now on
    assert ev.expire(204.8) == []
    (late,) = ev.expire(204.9)
    assert late.values() == dict.fromkeys(
        [
            f"eval/random/{name}"
            for name in ("step", "success_rate", "reward_mean", "domain/lake/success_rate")
        ],
        0.0,
    )
    assert late.closed == {"timeout": 3}
    ev.start(0, "random", 0, 5.0)
    (nothing,) = ev.expire(105.0)
    assert nothing.values() == {}


# ------------------------------------------------------------------------------------------------------
# tickets


Reports = dict[str, list[int] | None]
BOTH = {"lake", "sea"}


def test_ticket_ages_only_while_a_hub_reports_it() -> None:
    ages, waiting = TicketAges(timeout_s=3.0), {1: "lake", 2: "sea", 3: "lake"}

    def passed(
        elapsed_s: float, reports: Reports, served: set[str] = BOTH, *, paused: bool = False
    ) -> list[int]:
        return ages.passed(elapsed_s, waiting, reports, served, paused=paused)

    assert passed(86_400.0, {}, BOTH) == []  # in its queue for a day
    assert passed(86_400.0, {"hub": [1, 2]}) == []  # the first report begins its time
    assert passed(86_400.0, {"hub": [1, 2]}, set()) == []  # a pool that it needs has no hub
    assert passed(86_400.0, {"hub": [1, 2]}, paused=True) == []
    assert passed(2.0, {"hub": [1, 2]}) == []
    assert passed(1.0, {"hub": [1, 2, 3]}, {"lake"}) == [1]
    assert passed(1.0, {"hub": [1, 2, 3]}) == [2]  # 1 has expired once, 3 is 1 s old
    assert passed(86_400.0, {"hub": [1]}) == []  # 3 was handed back, or is in a reward queue
    assert passed(2.0, {"hub": [1], "scorer": [3]}) == []
    assert passed(2.0, {"hub": [1], "scorer": [3]}) == []
    assert passed(1.0, {"hub": [1], "scorer": [3]}) == [3]


def test_silence_of_a_hub_proves_no_work() -> None:
    """A hub that was killed is among the members for a minute; what it had may be in its queue
    again.
    """
    ages, waiting = TicketAges(timeout_s=3.0), {1: "lake", 2: "lake"}
    reports: Reports = {"hub": [1, 2]}
    assert ages.passed(1.0, waiting, reports, BOTH) == []
    assert ages.passed(60.0, waiting, {"hub": None}, BOTH) == []
    # it was only late, and has had 2 all the time
    assert ages.passed(1.0, waiting, {"hub": [2]}, BOTH) == [2]
    assert ages.passed(1.0, waiting, {"hub": [1]}, BOTH) == []
    assert ages.passed(2.0, waiting, {}, BOTH) == []
    assert ages.passed(2.0, waiting, {"hub": [1]}, BOTH) == []  # another process of that name


# -----------------------------------------------------------------------------------------------------
# training


class Recording:
    """A backend that notes what it is given."""

    vocab_size = 100
    rules: tuple[int, int] = (0, 0)

    def follow_rules(self, *, steps: int, seed: int) -> None:
        self.rules = steps, seed

    def __init__(self, budget: int = 3) -> None:
        self.batches: list[list[int]] = []
        self.fail = False
        self.closed = False
        self._budget = budget

    def cutter(self) -> MicroBatchCutter[TrainSample]:
        return MicroBatchCutter(self._budget)

    def close(self) -> None:
        self.closed = True

    def forward_backward(self, samples: list[TrainSample]) -> dict[str, float]:
        if self.fail:
            raise RuntimeError("out of memory")
        self.batches.append([sample.group for sample in samples])
        return {}

    def step(self) -> dict[str, float]:
        return {"actor/pg_loss": 1.5}

    def discard(self) -> None:
        self.batches.clear()


def halves(trajectories: Any, algorithm: AlgorithmSection) -> list[Any]:
    return [np.full(len(one.loss_mask.array()), 0.5) for one in trajectories]


async def a_training(backend: Recording) -> TrainingThread:
    training = TrainingThread(lambda: backend, halves, AlgorithmSection())  # type: ignore[arg-type, return-value]
    await training.open()
    return training


async def test_micro_batches_start_before_the_step_is_full_and_follow_the_order_of_the_groups() -> (
    None
):
    backend = Recording(budget=9)
    # three inputs a sample, so three samples fill a micro-batch
    training = await a_training(backend)
    for number in (5, 3):
        training.add(group([trajectory(0), trajectory(1)], ticket=number))
    await training.call(lambda: None)
    assert backend.batches == [[5, 5, 3]]
    training.add(group([trajectory(0), trajectory(1)], ticket=4))
    trained = await training.finish(version=0)
    assert backend.batches == [[5, 5, 3], [3, 4, 4]]
    assert trained is not None
    assert (trained.num_samples, trained.num_tokens, trained.values["actor/pg_loss"]) == (
        6,
        12,
        1.5,
    )
    assert trained.values["reward/mean"] == 1.0
    training.close()


class Whole(Recording):
    """A backend that takes a step at once."""

    kl_coef = 0.5

    def score(self, samples: list[TrainSample]) -> list[SampleScores]:
        self.batches.append([-sample.group for sample in samples])
        return [SampleScores(kl=np.zeros(sample.num_tokens, np.float32)) for sample in samples]

    def update(self, samples: list[TrainSample]) -> dict[str, float]:
        self.batches.append([sample.group for sample in samples])
        return {"actor/pg_loss": 2.5}


@pytest.mark.parametrize("stream", [True, False])
async def test_an_algorithm_that_needs_the_whole_step_scores_groups_that_are_there(
    stream: bool,
) -> None:
    backend = Whole(budget=9)  # three inputs a sample, so three samples fill a micro-batch
    algorithm = AlgorithmSection(kl_coef=0.5, kl_placement="reward")
    training = TrainingThread(lambda: backend, halves, algorithm, stream=stream)  # type: ignore[arg-type, return-value]
    await training.open()
    for number in (5, 3):
        training.add(group([trajectory(0), trajectory(1)], ticket=number))
    await training.call(lambda: None)
    assert backend.batches == ([[-5, -5, -3]] if stream else [])
    trained = await training.finish(version=0)
    # cut by their order, whenever they came
    assert backend.batches == [[-5, -5, -3], [-3], [5, 5, 3, 3]]
    assert trained is not None
    assert trained.values["actor/pg_loss"] == 2.5
    training.add(group([trajectory(0), trajectory(1)], ticket=4))
    training.abandon()
    assert await training.finish(version=1) is None
    assert len(backend.batches) == 3
    training.close()


async def test_scores_of_a_step_that_is_undone_are_forgotten() -> None:
    backend = Whole(budget=9)
    algorithm = AlgorithmSection(kl_coef=0.5, kl_placement="reward")
    training = TrainingThread(lambda: backend, halves, algorithm)  # type: ignore[arg-type, return-value]
    await training.open()
    training.add(group([trajectory(0), trajectory(1)], ticket=5))
    await training.undo()
    assert await training.call(lambda: training._scores.finish([])) == []
    training.close()


async def test_a_step_of_which_only_some_groups_are_trained_on_scores_no_others() -> None:
    backend = Whole(budget=9)
    algorithm = AlgorithmSection(
        pg_variant="starpo_s", keep_fraction=0.5, critic=CriticSection(enabled=True)
    )
    training = TrainingThread(lambda: backend, halves, algorithm)  # type: ignore[arg-type, return-value]
    await training.open()
    training.add(group([trajectory(0), trajectory(1)], ticket=5))
    training.add(group([trajectory(0, 0.0), trajectory(1, 1.0)], ticket=3))
    await training.finish(version=0)
    assert backend.batches == [[-3, -3], [3, 3]]
    training.close()


def step_rules(keep_fraction: float) -> TicketRules:
    return TicketRules(
        40, 3, 1, "wait", 7, (DomainRule("lake", 1.0, 2, 2, 1.0),), keep_fraction=keep_fraction
    )


VARIED = group([trajectory(0, 0.0), trajectory(1, 1.0)], ticket=3)
ALIKE = [group([trajectory(0), trajectory(1)], ticket=ticket) for ticket in (4, 5)]


@pytest.mark.parametrize(
    ("fractions", "trained"),
    [
        ([0.3, 0.3, 0.3, 0.3], [3]),
        ([0.3, 0.3, 1.0, 1.0], [4, 3, 5]),  # a record with other rules is read while the step fills
        ([1.0, 1.0, 1.0, 0.3], [3]),
        ([1.0, 0.3, 0.3, 0.3], [3]),
        ([1.0, 1.0, 1.0, 1.0], [4, 3, 5]),
    ],
)
@pytest.mark.parametrize("variant", ["ppo", "starpo_s", "scored"])
async def test_log_decides_which_groups_are_trained_on(
    variant: str, fractions: list[float], trained: list[int]
) -> None:
    """Not the configuration, which may have changed since the records were stored."""
    backend = Whole(budget=6)
    scored = {"kl_coef": 0.5, "kl_placement": "reward"}
    algorithm = AlgorithmSection(**(scored if variant == "scored" else {"pg_variant": variant}))  # type: ignore[arg-type]
    training = TrainingThread(lambda: backend, halves, algorithm)  # type: ignore[arg-type, return-value]
    await training.open()
    for one, fraction in zip((ALIKE[0], VARIED, ALIKE[1]), fractions, strict=False):
        training.add(one, step_rules(fraction))
    done = await training.finish(0, step_rules(fractions[-1]))
    assert done is not None
    assert done.tickets == tuple(trained)
    assert (
        list(dict.fromkeys(ticket for batch in backend.batches for ticket in batch if ticket > 0))
        == trained
    )
    assert backend.rules == (40, 7)
    training.add(VARIED, step_rules(1.0))
    backend.batches.clear()
    assert (await training.finish(1, step_rules(1.0))).tickets == (3,)  # type: ignore[union-attr]
    training.close()


async def test_a_step_that_could_stream_waits_if_it_is_told_to() -> None:
    backend = Whole()
    training = TrainingThread(lambda: backend, halves, AlgorithmSection(), stream=False)  # type: ignore[arg-type, return-value]
    await training.open()
    training.add(group([trajectory()]))
    await training.finish(version=0)
    assert backend.batches == [[1]]  # nobody was asked for scores
    training.close()


def test_greedy_baselines_count_nowhere_but_as_baselines() -> None:
    with_baseline = group(
        [trajectory(0, 1.0), msgspec.structs.replace(trajectory(1, 9.0), greedy=True)]
    )
    assert record_intake.episode_rewards(with_baseline) == (1.0,)


async def test_an_abandoned_step_is_not_taken() -> None:
    backend = Recording()
    training = await a_training(backend)
    training.add(group([trajectory(0), trajectory(1)]))
    await training.call(lambda: None)
    assert backend.batches == [[1]]
    training.abandon()
    training.add(group())
    assert await training.finish(version=0) is None
    assert backend.batches == [[1]]
    await training.undo()
    assert backend.batches == []
    training.close()


async def test_a_failing_backend_is_noticed_at_once_and_the_step_is_not_taken() -> None:
    backend = Recording()
    backend.fail = True
    training = await a_training(backend)
    training.add(group([trajectory(0), trajectory(1)]))
    with pytest.raises(RuntimeError, match="out of memory"):
        await asyncio.wait_for(asyncio.shield(training.failed), 60)
    with pytest.raises(RuntimeError, match="out of memory"):
        await training.finish(version=0)
    training.close()
