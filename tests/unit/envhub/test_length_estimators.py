"""What the estimators of lengths predict: hand-computed quantiles, and that they find what there is
to find.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.errors import ConfigError
from broker.settings.config import Section
from envhub.lengths import ESTIMATORS
from envhub.lengths.base import LengthEstimator, LengthKnowledge, UpcomingTurn
from envhub.lengths.history import LEVEL_MEMORY, NUM_TASKS, TaskEffects, TaskHistory
from envhub.lengths.mean import RunningMean
from envhub.lengths.regression import MEMORY, SOLVE_EVERY, OnlineRegression
from envhub.lengths.selection import load_estimator, task_key
from envhub.lengths.shared import averaged

Z_HIGH = 1.2815515655446004  # 0.9 quantile of the normal distribution


def turn(
    task: int = 0, number: int = 0, prompt: list[int] | None = None, previous: int = 0
) -> UpcomingTurn:
    return UpcomingTurn(array("i", prompt or [1, 2, 3]), 4096, task, number, previous)


def made(name: str) -> LengthEstimator:
    return load_estimator("d", name, {})()


def quantiles(estimator: LengthEstimator, of: UpcomingTurn) -> tuple[float, float]:
    found = estimator.predict(of)
    assert isinstance(found, tuple)
    return found


def play(estimator: LengthEstimator, of: UpcomingTurn, tokens: int) -> None:
    """Predict and observe a turn, as a hub does."""
    estimator.predict(of)
    estimator.observe(of, tokens)


def test_the_mean_follows_the_turns() -> None:
    mean = RunningMean()
    assert mean.predict(turn()) is None
    mean.observe(turn(), 10)
    assert mean.predict(turn()) == 10
    mean.observe(turn(), 30)
    assert mean.predict(turn()) == pytest.approx(11)  # a twentieth of the way
    for _ in range(300):
        mean.observe(turn(), 40)
    assert mean.predict(turn()) == pytest.approx(40)


def test_the_first_turns_set_the_level_and_the_spread() -> None:
    history = TaskHistory(Section())
    assert history.predict(turn(task=1)) is None
    play(history, turn(task=1), 100)
    assert quantiles(history, turn(task=2)) == pytest.approx((100, 100 * math.exp(Z_HIGH * 0.01)))
    play(history, turn(task=2), 400)
    spread = math.sqrt(math.log(4) ** 2 / 2)  # one error of 0 and one of log(4)
    assert quantiles(history, turn(task=3)) == pytest.approx((200, 200 * math.exp(Z_HIGH * spread)))
    # no two turns of a task yet: no effect is known
    assert quantiles(history, turn(task=2))[0] == pytest.approx(200)


def test_a_task_is_predicted_from_its_own_turns_and_an_unknown_one_from_all() -> None:
    history, rng = TaskHistory(Section()), np.random.default_rng(0)
    effects = rng.normal(0, 0.8, 40)
    for _ in range(12):
        for task, effect in enumerate(effects, start=1):
            play(history, turn(task), round(200 * math.exp(effect + rng.normal(0, 0.4))))
    for task, effect in enumerate(effects, start=1):
        median, high = quantiles(history, turn(task))
        assert median == pytest.approx(200 * math.exp(effect), rel=0.5)
        assert high / median == pytest.approx(math.exp(Z_HIGH * 0.4), rel=0.2)
    median, high = quantiles(history, turn(task=99))
    assert median == pytest.approx(200 * math.exp(effects.mean()), rel=0.2)
    assert high / median == pytest.approx(math.exp(Z_HIGH * math.hypot(0.8, 0.4)), rel=0.3)


def test_little_history_is_drawn_to_the_domain() -> None:
    history = TaskHistory(Section())
    for _ in range(100):
        for task, tokens in ((1, 50), (1, 200), (2, 100), (2, 400)):
            play(history, turn(task), tokens)
    play(history, turn(task=9), 3000)
    known_once = quantiles(history, turn(task=9))[0]
    for _ in range(20):
        play(history, turn(task=9), 3000)
    assert 141 < known_once < 1000 < quantiles(history, turn(task=9))[0] < 3100


def test_each_turn_of_an_episode_has_its_level() -> None:
    history = TaskHistory(Section())
    for _ in range(LEVEL_MEMORY):
        for number, tokens in enumerate((30, 60, 120)):
            play(history, turn(number=number), tokens)
    assert [round(quantiles(history, turn(number=number))[0]) for number in range(4)] == [
        30,
        60,
        120,
        120,
    ]


def test_a_table_of_tasks_keeps_the_newest_of_those_that_share_a_place() -> None:
    effects = TaskEffects()
    effects.add(7, 1.0)
    effects.add(7, 2.0)
    assert effects.get(7) == (2.0, 1.5)
    assert effects.get(7 + NUM_TASKS) == (0.0, 0.0)
    effects.add(7 + NUM_TASKS, 4.0)
    assert effects.get(7) == (0.0, 0.0)
    assert effects.get(7 + NUM_TASKS) == (1.0, 4.0)
    effects.add(0, 9.0)  # a turn of no known task
    assert effects.get(0) == (0.0, 0.0)


def learned(
    kind: Callable[[Section], LengthEstimator], sample: Callable[[np.random.Generator], Any]
) -> float:
    """Mean error of log lengths over the last of 600 turns, each of a new task."""
    estimator, rng, errors = kind(Section()), np.random.default_rng(1), []
    for number in range(600):
        prompt, previous, tokens = sample(rng)
        of = turn(number + 1, 1 if previous else 0, prompt, previous)
        found = estimator.predict(of)
        if number >= 400:
            assert isinstance(found, tuple)
            errors.append(abs(math.log(tokens / found[0])))
        estimator.observe(of, tokens)
    return float(np.mean(errors))


def long_prompts(rng: np.random.Generator) -> tuple[list[int], int, int]:
    """Answers are half as long as their prompts."""
    size = int(rng.integers(10, 1000))
    return rng.integers(0, 1000, size).tolist(), 0, max(size // 2, 1)


def telling_tokens(rng: np.random.Generator) -> tuple[list[int], int, int]:
    """A prompt with token 17 has a long answer."""
    prompt = rng.integers(18, 40, 30).tolist()
    is_long = bool(rng.random() < 0.5)
    return [*prompt, *([17] * 3 if is_long else [])], 0, 400 if is_long else 50


def alike_turns(rng: np.random.Generator) -> tuple[list[int], int, int]:
    """A turn is as long as the one before."""
    previous = int(rng.integers(5, 500))
    return [1, 2, 3], previous, previous


@pytest.mark.parametrize(
    ("sample", "most"), [(long_prompts, 0.15), (telling_tokens, 0.45), (alike_turns, 0.1)]
)
def test_the_regression_finds_what_the_history_cannot_know(sample: Any, most: float) -> None:
    assert learned(OnlineRegression, sample) < most < learned(TaskHistory, sample)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_what_was_learnt_is_taken_over(name: str) -> None:
    first, second, rng = made(name), made(name), np.random.default_rng(2)
    prompts = [rng.integers(0, 1000, 40).tolist() for _ in range(10)]
    for _ in range(200):
        task = int(rng.integers(10))
        play(first, turn(task + 1, task % 3, prompts[task], 20), int(rng.integers(1, 900)))
    known = first.knowledge()
    assert known is not None
    assert second.adopt(known)
    for task in range(10):
        of = turn(task + 1, task % 3, prompts[task], 20)
        # it solves with all turns
        assert second.predict(of) == pytest.approx(first.predict(of), rel=0.05)
    assert not second.adopt(known._replace(values=known.values[:-1]))  # of another version


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(max_examples=40, deadline=None)
@given(
    turns=st.lists(
        st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 20), st.integers(0, 10**6)), max_size=40
    )
)
def test_predictions_are_positive_and_in_order_whatever_came(
    name: str, turns: list[tuple[int, int, int]]
) -> None:
    estimator = made(name)
    for task, number, tokens in turns:
        of = turn(task, number, [task % 1000] * (number + 1), tokens)
        found = estimator.predict(of)
        if found is not None:
            median, high = found if isinstance(found, tuple) else (found, found)
            assert 0 < median <= high < math.inf
        estimator.observe(of, tokens)


def test_a_regression_that_has_learnt_for_long_can_still_be_stored() -> None:
    estimator = OnlineRegression(None)
    for _ in range(MEMORY + 2 * SOLVE_EVERY):
        play(estimator, turn(), 30)
    assert estimator.knowledge().values[-1] == MEMORY
    assert estimator.adopt(estimator.knowledge())


def known(
    values: list[float], tasks: list[int], counts: list[float], means: list[float]
) -> LengthKnowledge:
    numbers = (np.array(one, np.float32) for one in (values, counts, means))
    first, *others = numbers
    return LengthKnowledge(first, np.array(tasks, np.int32), *others)


def test_two_hubs_knowledge_is_averaged_by_the_turns_since_they_met() -> None:
    ours, theirs = (
        known([1, 10], [5, 7], [2, 4], [0.5, 1.0]),
        known([2, 20], [7, 9], [12, 1], [2.0, -1.0]),
    )
    found = averaged(ours, theirs, own_turns=100, other_turns=300)
    assert found.values.tolist() == [1.75, 17.5]
    assert found.tasks.tolist() == [5, 7, 9]
    assert found.counts.tolist() == [2, 12, 1]
    assert found.means.tolist() == pytest.approx([0.5, 1.75, -1.0])
    assert averaged(ours, theirs, own_turns=0, other_turns=1).values.tolist() == [2, 20]


def test_too_many_tasks_lose_the_other_sides_that_are_known_least() -> None:
    ours = known([], list(range(1, 4000)), [1.0] * 3999, [0.0] * 3999)
    theirs = known([], list(range(5001, 5201)), [float(one) for one in range(1, 201)], [1.0] * 200)
    found = averaged(ours, theirs, 1, 1)
    assert found.tasks.tolist() == [*range(1, 4000), *range(5104, 5201)]


@pytest.mark.parametrize(
    ("name", "args", "problem"),
    [
        (
            "hystory",
            {},
            r"domains.d.length_estimator: 'hystory' is not allowed; did you mean 'history'\? known: history",
        ),
        ("history", {"tasks": 3}, r"domains.d.length_estimator_args.tasks: "),
        (
            "math:pi",
            {},
            r"domains.d.length_estimator: 'math:pi' is not allowed; it must be a function of \(turn\)",
        ),
        (
            "calendar:isleap",
            {"depth": 3},
            r"domains.d.length_estimator_args: .*arguments of calendar:isleap: ",
        ),
        (
            "array:array",
            {},
            r"a class that derives from envhub.lengths.base.LengthEstimator, or a function",
        ),
    ],
)
def test_a_wrong_setting_names_its_key(name: str, args: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_estimator("d", name, args)


def test_a_class_without_predict_is_refused(tmp_path: Any) -> None:
    (tmp_path / "mine.py").write_text(
        "from envhub.lengths.base import LengthEstimator\nclass Mine(LengthEstimator):\n    pass\n"
    )
    with pytest.raises(
        ConfigError, match=r"class Mine \(mine.py:2\) has no method predict\(self, turn\)"
    ):
        load_estimator("d", f"{tmp_path}/mine.py:Mine", {})


def test_equal_prompts_are_one_task() -> None:
    assert task_key([1, 2, 3]) == task_key(array("i", [1, 2, 3])) != task_key([1, 2, 4])
