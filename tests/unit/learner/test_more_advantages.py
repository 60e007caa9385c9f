"""Estimators beyond the group mean, by numbers worked out by hand and by what must hold for each."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.contract import wire
from broker.errors import ConfigError
from broker.settings.registry import resolve
from learner.algorithm.advantages import (
    ADVANTAGES,
    dr_grpo,
    gae,
    gigpo,
    grpo,
    reinforce_plus_plus,
    remax,
)
from learner.algorithm.advantages.base import (
    BatchRow,
    discounted_returns,
    step_discounts,
    token_rewards,
    token_turns,
    whiten_arrays,
)
from learner.algorithm_checks import estimators_with
from learner.config import AlgorithmSection

some = settings(max_examples=60, deadline=None)
REWARDS = st.lists(st.floats(-10, 10, allow_subnormal=False), min_size=1, max_size=12)


def trajectory(
    turns: list[tuple[int, int, float, str]], n: int, *, total: float | None = None, **more: object
) -> wire.Trajectory:
    mask = np.zeros(n, np.uint8)
    for start, end, _, _ in turns:
        mask[start:end] = 1
    made = wire.Trajectory(
        episode=0,
        token_ids=wire.column(np.arange(n), "<i4"),
        loss_mask=wire.column(mask, "|u1"),
        logprobs=wire.column(np.where(mask, -1.0, 0.0), "<f4"),
        version_runs=wire.column([0, int(mask.sum())], "<i4"),
        turns=[
            wire.Turn(
                start=a, end=b, reward=r, valid=True, finish_reason="stop", server="s", anchor=x
            )
            for a, b, r, x in turns
        ],
        reward=sum(r for _, _, r, _ in turns) if total is None else total,
        reward_parts={},
        success=False,
        end="terminated",
    )
    return msgspec.structs.replace(made, **more)


def row(
    rewards: list[float], values: list[float] | None = None, group: int = 0, *, trained: bool = True
) -> BatchRow:
    return BatchRow(
        group,
        np.array(rewards),
        None if values is None else np.array(values),
        trained=trained,
        energies=np.ones(len(rewards)),
        parts={"env": sum(rewards)},
    )


def test_discounting_by_hand() -> None:
    # 4; 2 + 0.5 * 4 = 4; 1 + 0.5 * 4 = 3.
    assert discounted_returns(np.array([1.0, 2.0, 4.0]), 0.5).tolist() == [3.0, 4.0, 4.0]


def test_rewards_stand_on_the_last_token_of_their_turn() -> None:
    # Sampled tokens 1, 2, 5. The total of 6 has 2 more than the turns: they come last.
    assert token_rewards(trajectory([(1, 3, 1.0, ""), (5, 6, 3.0, "")], 7, total=6.0)).tolist() == [
        0.0,
        1.0,
        5.0,
    ]
    # a turn without tokens
    assert token_rewards(trajectory([(1, 3, 1.0, ""), (3, 3, 2.0, "")], 7)).tolist() == [0.0, 3.0]
    assert token_rewards(trajectory([], 7, total=3.0)).tolist() == []


def test_whitening_by_hand() -> None:
    # 1, 2, 3, 6: mean 3, squared deviations 4 + 1 + 0 + 9 = 14, over 3: std 2.1602469. What is not
    # counted becomes 0.
    first, second, left = whiten_arrays(
        [np.array([1.0, 2.0]), np.array([3.0, 6.0]), np.array([99.0])], [True, True, False]
    )
    assert np.concatenate([first, second]).tolist() == pytest.approx(
        [-0.9258201, -0.4629100, 0.0, 1.3887301]
    )
    assert left.tolist() == [0.0]


@some
@given(st.lists(REWARDS, min_size=1, max_size=4))
def test_whitened_tokens_have_mean_zero_and_deviation_one(rows: list[list[float]]) -> None:
    everything = np.concatenate([np.array(r) for r in rows])
    white = np.concatenate(whiten_arrays([np.array(r) for r in rows], [True] * len(rows)))
    if everything.min() == everything.max():
        assert not white.any()
    elif everything.std(ddof=1) > 1e-3:
        assert white.mean() == pytest.approx(0, abs=1e-6)
        assert white.std(ddof=1) == pytest.approx(1, abs=1e-4)


def test_dr_grpo_by_hand() -> None:
    # Rewards 3, 1, 2: mean 2, not divided by anything.
    group = [trajectory([(1, 3, r, "")], 3, episode=i) for i, r in enumerate((3.0, 1.0, 2.0))]
    assert [a.tolist() for a in dr_grpo.estimate(group, AlgorithmSection(norm_std=True))] == [
        [0, 1, 1],
        [0, -1, -1],
        [0, 0, 0],
    ]


def test_remax_by_hand() -> None:
    # Greedy earns 0.5: 1 - 0.5, 0 - 0.5, and the baseline itself is never trained on.
    three = enumerate(((1.0, False), (0.0, False), (0.5, True)))
    group = [trajectory([(1, 2, r, "")], 2, greedy=greedy, episode=i) for i, (r, greedy) in three]
    assert [a.tolist() for a in remax.estimate(group, AlgorithmSection())] == [
        [0, 0.5],
        [0, -0.5],
        [0, 0],
    ]
    # without a baseline there is nothing to learn
    assert not any(a.any() for a in remax.estimate(group[:2], AlgorithmSection()))
    assert remax.advantages_over_greedy(np.array([1.0, 0.0]), 0.5).tolist() == [0.5, -0.5]


def test_reinforce_plus_plus_by_hand() -> None:
    # gamma 0.5: returns (0 + 1, 2) and (-2). 1, 2, -2: mean 1/3, squared deviations 4/9 + 25/9 +
    # 49/9 = 78/9, over 2: std 2.0816660.
    found = reinforce_plus_plus.estimate(
        [row([0.0, 2.0]), row([-2.0])], AlgorithmSection(gamma=0.5)
    )
    assert np.concatenate([one.advantages for one in found]).tolist() == pytest.approx(
        [0.3202563, 0.8006408, -1.1208971]
    )


def test_reinforce_plus_plus_with_a_baseline_by_hand() -> None:
    # Group 0: 3 and 1 give 1 and -1; group 1 is alone: 0. Tokens 1, 1, -1, 0: mean 0.25, squared
    # deviations 2 * 0.5625 + 1.5625 + 0.0625 = 2.75, over 3: std 0.9574271.
    rows = [row([0.0, 3.0], group=0), row([1.0], group=0), row([5.0], group=1)]
    found = reinforce_plus_plus.estimate_baseline(rows, AlgorithmSection())
    assert np.concatenate([one.advantages for one in found]).tolist() == pytest.approx(
        [0.7833495, 0.7833495, -1.3055825, -0.2611165]
    )


def test_gae_by_hand() -> None:
    # gamma 0.9, lambda 0.5, r = 0, 1, 2, V = 1, 2, 3. delta_2 = 2 - 3 = -1; delta_1 = 1 + 2.7 - 2 =
    # 1.7; delta_0 = 1.8
    # - 1 = 0.8. A_2 = -1; A_1 = 1.7 - 0.45 = 1.25; A_0 = 0.8 + 0.45 * 1.25 = 1.3625.
    assert gae.generalized_advantages(
        np.array([0.0, 1.0, 2.0]), np.array([1.0, 2.0, 3.0]), 0.9, 0.5
    ).tolist() == pytest.approx([1.3625, 1.25, -1.0])


def test_gae_targets_come_from_advantages_before_whitening() -> None:
    # As above: A + V = 2.3625, 3.25, 2. Whitened: mean 0.5375, deviations 0.825, 0.7125, -1.5375,
    # squares 3.5522, over 2: 1.3327017.
    section = AlgorithmSection(gamma=0.9, gae_lambda=0.5)
    (found,) = gae.estimate([row([0.0, 1.0, 2.0], [1.0, 2.0, 3.0])], section)
    assert found.returns is not None
    assert found.returns.tolist() == pytest.approx([2.3625, 3.25, 2.0])
    assert found.advantages.tolist() == pytest.approx([0.6190433, 0.5346283, -1.1536715])


def test_gae_discounts_per_turn_by_hand() -> None:
    # The same with turns 0, 0, 1: the first token discounts nothing. delta_0 = 0 + 2 - 1 = 1, A_0 =
    # 1 + 0.5 * 1.25 = 1.625; A_1 and A_2 as above. Targets A + V, which are not whitened.
    one = dataclasses.replace(row([0.0, 1.0, 2.0], [1.0, 2.0, 3.0]), turns=np.array([0, 0, 1]))
    section = AlgorithmSection(gamma=0.9, gae_lambda=0.5, discount="turn")
    (found,) = gae.estimate([one], section)
    assert found.returns is not None
    assert found.returns.tolist() == pytest.approx([2.625, 3.25, 2.0])


def test_turns_and_discounts_of_tokens() -> None:
    # Tokens 1, 2, 5, 6 in two turns; 3 and 4 are the environment's.
    turns = token_turns(trajectory([(1, 3, 0.0, ""), (5, 7, 0.0, "")], 8))
    assert turns.tolist() == [0, 0, 1, 1]
    per_turn = AlgorithmSection(gamma=0.5, discount="turn")
    assert step_discounts(turns, per_turn).tolist() == [1.0, 0.5, 1.0, 0.5]
    assert step_discounts(turns, AlgorithmSection(gamma=0.5)).tolist() == [0.5] * 4
    assert step_discounts(turns[:0], per_turn).tolist() == []


@some
@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=1, max_size=20))
def test_gae_with_lambda_one_is_the_return_minus_the_value(
    pairs: list[tuple[float, float]],
) -> None:
    rewards, values = (np.array(column) for column in zip(*pairs, strict=True))
    assert gae.generalized_advantages(rewards, values, 0.9, 1.0) == pytest.approx(
        discounted_returns(rewards, 0.9) - values, abs=1e-9
    )
    following = np.append(values[1:], 0.0)
    assert gae.generalized_advantages(rewards, values, 0.9, 0.0) == pytest.approx(
        rewards + 0.9 * following - values, abs=1e-9
    )


# ------------------------------------------------------------------------------------------------------------
# gigpo


def test_gigpo_by_hand() -> None:
    # Two episodes from A: one reaches the goal over B (rewards 0, 1), the other stays at A and
    # fails (0, 0). gamma 0.5. Episodes: 1 and 0, mean 0.5: +-0.5. Returns: 0.5, 1; 0, 0. Steps from
    # A: 0.5, 0, 0 with mean 1/6; from B: alone,
    # 0. Without the deviation and with weight 3: first episode 0.5 + 3 * (1/3) = 1.5 and 0.5 + 0;
    #   second -0.5 - 3/6 = -1 twice.
    group = [
        trajectory([(1, 2, 0.0, "A"), (3, 5, 1.0, "B")], 5, episode=0),
        trajectory([(1, 2, 0.0, "A"), (3, 4, 0.0, "A")], 5, episode=1),
    ]
    section = AlgorithmSection(gamma=0.5, norm_std=False, step_advantage_w=3.0)
    first, second = gigpo.estimate(group, section)
    assert first.tolist() == pytest.approx([0, 1.5, 0, 0.5, 0.5])
    assert second.tolist() == pytest.approx([0, -1.0, 0, -1.0, 0])


def test_gigpo_divides_by_the_deviation_of_each_group() -> None:
    # Episodes 1 and 0: std 0.7071068, 0.5 / 0.7071078 = 0.7071058. Steps from A: returns 1 and 0:
    # the same again.
    group = [trajectory([(1, 2, r, "A")], 2, episode=i) for i, r in enumerate((1.0, 0.0))]
    first, second = gigpo.estimate(group, AlgorithmSection())
    assert first[1] == pytest.approx(2 * 0.7071058, abs=1e-6)
    assert second[1] == -first[1]


def test_step_independent_samples_are_the_same_steps() -> None:
    # One sample per step, sharing the episode's number; the last one holds the episode's total.
    whole = [
        trajectory([(1, 2, 0.0, "A"), (3, 5, 1.0, "B")], 5, episode=0, total=2.0),
        trajectory([(1, 2, 0.0, "A"), (3, 4, 0.0, "A")], 5, episode=1),
    ]
    steps = [
        trajectory([(1, 2, 0.0, "A")], 2, episode=0, total=0.0),
        trajectory([(3, 5, 1.0, "B")], 5, episode=0, total=2.0),
        trajectory([(1, 2, 0.0, "A")], 2, episode=1),
        trajectory([(3, 4, 0.0, "A")], 5, episode=1),
    ]
    section = AlgorithmSection(gamma=0.9)
    joined, apart = gigpo.estimate(whole, section), gigpo.estimate(steps, section)
    assert [joined[0][1], joined[0][3], joined[1][1], joined[1][3]] == pytest.approx(
        [apart[0][1], apart[1][3], apart[2][1], apart[3][3]]
    )


@pytest.mark.parametrize("name", sorted(set(estimators_with("counts_episodes")) - {"gigpo"}))
def test_an_episode_cut_into_steps_counts_once(name: str) -> None:
    whole = [
        trajectory([(1, 2, 0.0, "A"), (3, 5, 2.0, "B")], 5, episode=0),
        trajectory([(1, 2, 0.0, "A")], 5, episode=1, total=1.0),
    ]
    steps = [
        trajectory([(1, 2, 0.0, "A")], 2, episode=0, total=2.0),
        trajectory([(3, 5, 2.0, "B")], 5, episode=0),
        trajectory([(1, 2, 0.0, "A")], 2, episode=1, total=1.0),
    ]
    estimate = resolve("advantages", name, ADVANTAGES)
    joined, apart = estimate(whole, AlgorithmSection()), estimate(steps, AlgorithmSection())
    # of k tries the best alone has an advantage
    assert joined[0][1] > 0 >= joined[1][1]
    assert [joined[0][1], joined[0][3], joined[1][1]] == [apart[0][1], apart[1][3], apart[2][1]]


def test_similar_observations_join_the_first_group_they_resemble() -> None:
    anchors = ["at cell 01 of lake", "at cell 02 of lake", "shop", "", "", "at cell 01 of lake"]
    assert gigpo.step_groups(anchors) == [0, 1, 2, 3, 4, 0]
    assert gigpo.step_groups(anchors, 0.9) == [0, 0, 1, 2, 3, 0]


def test_gigpo_without_anchors_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"domains\.DOMAIN\.anchors observation, or an"):
        gigpo.estimate([trajectory([(1, 2, 1.0, "")], 2)], AlgorithmSection())


@some
@given(REWARDS)
def test_gigpo_with_a_weight_of_zero_is_grpo(rewards: list[float]) -> None:
    group = [trajectory([(1, 3, r, f"{i % 2}")], 3, episode=i) for i, r in enumerate(rewards)]
    found = gigpo.estimate(group, AlgorithmSection(step_advantage_w=0.0))
    for ours, theirs in zip(found, grpo.estimate(group, AlgorithmSection()), strict=True):
        assert ours == pytest.approx(theirs)


# -------------------------------------------------------------------------------------------------------
# properties


@pytest.mark.parametrize("name", sorted(set(ADVANTAGES) - set(estimators_with("whole_batch"))))
def test_masking_a_token_equals_removing_it(name: str) -> None:
    # What the environment says between turns may be long or short, or anything at all.
    short = [
        trajectory([(1, 3, 0.5, "A"), (4, 6, r, "B")], 6, episode=i, greedy=i == 2)
        for i, r in enumerate((1.0, 0.0, 0.25))
    ]
    long = [
        trajectory([(3, 5, 0.5, "A"), (9, 11, r, "B")], 14, episode=i, greedy=i == 2)
        for i, r in enumerate((1.0, 0.0, 0.25))
    ]
    estimator = resolve("advantages", name, ADVANTAGES)
    section = AlgorithmSection(gamma=0.7)
    for a, b, x, y in zip(
        estimator(short, section), estimator(long, section), short, long, strict=True
    ):
        assert a[x.loss_mask.array() == 1] == pytest.approx(b[y.loss_mask.array() == 1])


@pytest.mark.parametrize("name", estimators_with("whole_batch"))
def test_whole_batch_estimators_leave_out_what_is_not_trained(name: str) -> None:
    # A row without gradient changes no whitening; where it has a group it still counts in the
    # group's mean.
    estimator = resolve("advantages", name, ADVANTAGES)
    rows = [row([0.0, 1.0], [0.5, 0.5], group=0), row([3.0], [0.0], group=1)]
    extra = row([100.0], [7.0], group=2, trained=False)
    before, after = (
        estimator(rows, AlgorithmSection()),
        estimator([*rows, extra], AlgorithmSection()),
    )
    for a, b in zip(before, after, strict=False):
        assert b.advantages == pytest.approx(a.advantages)
    assert not after[-1].advantages.any()
