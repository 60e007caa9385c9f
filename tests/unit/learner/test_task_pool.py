"""The choice of tasks by hand-worked examples, and what always holds of it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.credit.task_pool import (
    ALWAYS,
    UNMEASURED,
    CurriculumRule,
    PoolState,
    Stage,
    TaskOrder,
    TaskPart,
    TaskRule,
    choose_task,
    encode_levels,
    next_part,
    observe_task,
    rates_of,
    task_chances,
    update_pool,
)

ALL = (Stage(0, 0.0, 1.0),)


def curriculum(**changes: object) -> CurriculumRule:
    return replace(CurriculumRule(ALL, "uniform", 0.0, 0.5), **changes)  # type: ignore[arg-type]


def pool_of(rule: TaskRule) -> PoolState:
    return update_pool(None, rule, 0)


def draw(pool: PoolState, rule: TaskRule, count: int, step: int = 0) -> list[int]:
    return [choose_task(pool, rule, key="0/lake", step=step) for _ in range(count)]


@given(num_tasks=st.integers(1, 300), key=st.text(max_size=3), epoch=st.integers(0, 5))
def test_order_is_a_permutation(num_tasks: int, key: str, epoch: int) -> None:
    order = TaskOrder(key, num_tasks)
    tasks = order.tasks(epoch * num_tasks, 10_000)
    assert sorted(tasks.tolist()) == list(range(num_tasks))
    single = [int(order.tasks(epoch * num_tasks + place, 1)[0]) for place in range(num_tasks)]
    assert single == tasks.tolist()


def test_permutations_differ() -> None:
    order = TaskOrder("0/lake/0", 1000)
    assert order.tasks(0, 1000).tolist() != order.tasks(1000, 1000).tolist()


def test_draws_are_uniform_numbers_of_32_bits() -> None:
    draws = TaskOrder("0/lake/0", 10).draws(7, 100_000)
    assert draws.max() < ALWAYS
    # the standard error of a mean of 100,000 uniform numbers is 0.0009
    assert abs(draws.mean() / ALWAYS - 0.5) < 0.005
    assert TaskOrder("0/lake/0", 10).draws(9, 1)[0] == draws[2]


def test_order_of_a_known_key() -> None:
    """The choice is part of what a resumed run repeats: it must not change between versions."""
    rule = TaskRule((TaskPart(7),))
    # Affine with the factor 3 and the offset 2.
    assert draw(pool_of(rule), rule, 7) == [2, 5, 1, 4, 0, 3, 6]


def test_pass_rate_is_a_moving_average() -> None:
    rule = TaskRule((TaskPart(2),), curriculum=curriculum(newest_weight=0.5))
    pool = pool_of(rule)
    assert rule.curriculum is not None
    assert np.isnan(rates_of(pool.levels)).all()
    # 2 of 8: 250 * 0.25 = 62.5, rounded to 63, 63 / 250 = 0.252
    observe_task(pool, rule.curriculum, 1, successes=2, episodes=8)
    assert rates_of(pool.levels)[1] == 0.252
    # 63 + 0.5 * (250 - 63) = 156.5, rounded to 157, 157 / 250 = 0.628
    observe_task(pool, rule.curriculum, 1, successes=8, episodes=8)
    assert rates_of(pool.levels)[1] == 0.628
    # A task that the pool lacks, or a group without episodes, changes nothing.
    observe_task(pool, rule.curriculum, 2, successes=1, episodes=1)
    observe_task(pool, rule.curriculum, 0, successes=0, episodes=0)
    assert pool.levels == bytearray([UNMEASURED, 157])


def test_chances_by_band_and_learnability() -> None:
    stages = (Stage(0, 0.2, 0.8), Stage(5, 0.0, 0.4))
    rule = curriculum(stages=stages, priority="learnability", explore=0.05)
    chances = task_chances(rule, 4) / ALWAYS
    # 4 p (1 - p): 1 at 0.5, 0.64 at 0.2 and 0.8
    assert chances[125] == 1.0
    assert chances[50] == pytest.approx(0.64, abs=1e-9)
    assert chances[200] == pytest.approx(0.64, abs=1e-9)
    assert chances[49] == chances[201] == chances[0] == pytest.approx(0.05, abs=1e-9)
    assert chances[UNMEASURED] == 1.0
    # From step 5 on the second band.
    later = task_chances(rule, 5) / ALWAYS
    assert later[125] == pytest.approx(0.05, abs=1e-9)
    # 4 * 0.3 * 0.7 = 0.84
    assert later[75] == pytest.approx(0.84, abs=1e-9)


def test_only_tasks_in_the_band_are_given() -> None:
    rates = {0: 0.0, 1: 0.5, 2: 1.0, 3: 0.6, 4: 0.1}
    rule = TaskRule(
        (TaskPart(5),),
        curriculum=curriculum(stages=(Stage(0, 0.4, 0.7),), initial=encode_levels(rates, 5)),
    )
    tasks = Counter(draw(pool_of(rule), rule, 100))
    assert tasks == {1: 50, 3: 50}


def test_explored_tasks_get_their_share() -> None:
    rates = {task: 0.5 if task < 50 else 0.0 for task in range(100)}
    rule = TaskRule(
        (TaskPart(100),),
        curriculum=curriculum(
            priority="learnability", explore=0.1, initial=encode_levels(rates, 100)
        ),
    )
    tasks = draw(pool_of(rule), rule, 5500)
    # In each permutation 50 tasks near one half, and 0.1 * 50 = 5 of the others.
    assert sum(task < 50 for task in tasks) == pytest.approx(5000, abs=60)


def test_unmeasured_tasks_come_first_and_all_of_them() -> None:
    rule = TaskRule((TaskPart(40),), curriculum=curriculum(stages=(Stage(0, 0.5, 0.5),)))
    assert sorted(draw(pool_of(rule), rule, 40)) == list(range(40))


def test_tasks_all_outside_the_band_are_given_in_turn() -> None:
    rule = TaskRule(
        (TaskPart(3),),
        curriculum=curriculum(
            stages=(Stage(0, 0.5, 0.5),), initial=encode_levels({0: 0.0, 1: 1.0, 2: 0.1}, 3)
        ),
    )
    assert Counter(draw(pool_of(rule), rule, 30)) == {0: 10, 1: 10, 2: 10}


def test_parts_get_their_shares() -> None:
    rule = TaskRule((TaskPart(4, 3.0), TaskPart(2, 1.0)))
    tasks = draw(pool_of(rule), rule, 16)
    # 3 : 1 of 16 tickets: 12 of the first part, each of its four tasks three times
    assert Counter(tasks) == {0: 3, 1: 3, 2: 3, 3: 3, 4: 2, 5: 2}
    # After 4 tickets: 3 and 1.
    assert sum(task < 4 for task in tasks[:4]) == 3
    assert next_part(rule.parts, [3, 1]) == 0


def test_other_tasks_begin_anew() -> None:
    rule = TaskRule((TaskPart(3),), digest="a", curriculum=curriculum())
    pool = pool_of(rule)
    draw(pool, rule, 2)
    observe_task(pool, curriculum(), 0, successes=1, episodes=1)
    same = update_pool(pool, replace(rule, curriculum=curriculum(explore=0.5)), 2)
    assert same.levels[0] == 250
    assert same.parts[0].cursor == 2
    other = update_pool(pool, replace(rule, digest="b"), 2)
    assert other.levels == bytearray([UNMEASURED] * 3)
    assert other.since == 2


def test_known_rates_fill_in_what_was_not_measured() -> None:
    rule = TaskRule((TaskPart(3),), curriculum=curriculum())
    pool = pool_of(rule)
    observe_task(pool, curriculum(), 0, successes=1, episodes=1)
    initial = encode_levels({0: 0.0, 1: 0.5}, 3)
    pool = update_pool(pool, replace(rule, curriculum=curriculum(initial=initial)), 1)
    assert pool.levels == bytearray([250, 125, UNMEASURED])


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    groups=st.lists(st.tuples(st.integers(0, 8), st.booleans()), max_size=60),
    priority=st.sampled_from(["uniform", "learnability"]),
    explore=st.sampled_from([0.0, 0.05, 1.0]),
)
def test_stored_state_makes_the_same_choices(
    sizes: list[int], groups: list[tuple[int, bool]], priority: str, explore: float
) -> None:
    """A state that went through JSON after any group chooses the same tasks."""
    rule = TaskRule(
        tuple(TaskPart(size, 1.0 + size) for size in sizes),
        curriculum=curriculum(stages=(Stage(0, 0.2, 0.9),), priority=priority, explore=explore),
    )
    assert rule.curriculum is not None
    pool = pool_of(rule)
    stored = pool_of(rule)
    for successes, is_stored in groups:
        task = choose_task(pool, rule, key="k", step=0)
        assert task == choose_task(stored, rule, key="k", step=0)
        assert 0 <= task < rule.num_tasks
        for each in (pool, stored):
            observe_task(each, rule.curriculum, task, successes=successes, episodes=8)
        if is_stored:
            text = json.dumps(msgspec.to_builtins(stored))
            stored = msgspec.convert(json.loads(text), PoolState, strict=False)
    assert stored == pool


def test_a_million_tasks_take_little_memory_and_time() -> None:
    num_tasks = 1_000_000
    rates = dict.fromkeys(range(num_tasks), 0.0)
    rates[77] = 0.5
    initial = encode_levels(rates, num_tasks)
    assert len(initial) < 20_000
    rule = TaskRule(
        (TaskPart(num_tasks),), curriculum=curriculum(priority="learnability", initial=initial)
    )
    pool = pool_of(rule)
    # The only task that can be learned from is found each time.
    assert draw(pool, rule, 3) == [77, 77, 77]
    assert len(json.dumps(msgspec.to_builtins(pool))) < 1_400_000
