"""One score per turn: from a reward's result to the advantages of gae, gigpo and gamma."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from broker.contract import checks, codec, wire
from broker.errors import WireError
from broker.settings.config import RewardConfig
from learner.algorithm.advantages import gae, gigpo, reinforce
from learner.algorithm.advantages.base import BatchRow, token_rewards
from learner.config import AlgorithmSection
from rewardhub.rewards.base import InvalidScoreError, Scored, Value, check_scored
from rewardhub.routing import (
    ForwardAction,
    GroupScoring,
    ScoreAction,
    rewards_digest,
)
from rewardhub.turn_scores import add_turn_scores

STEPS = RewardConfig(name="my.py:steps", weight=0.5)


def make_turn(start: int, anchor: str, reward: float = 0.0) -> wire.Turn:
    return wire.Turn(
        start=start, end=start + 2, reward=reward, valid=True, finish_reason="stop", server="r",
        anchor=anchor,
    )  # fmt: skip


def make_trajectory(episode: int, turns: list[wire.Turn]) -> wire.Trajectory:
    """Return a prompt of one token, and turns of two tokens with one of the environment between."""
    mask = [0] + [1, 1, 0] * (len(turns) - 1) + [1, 1]
    return wire.Trajectory(
        episode=episode,
        token_ids=wire.column(range(len(mask)), "<i4"),
        loss_mask=wire.column(mask, "|u1"),
        logprobs=wire.column([-float(bit) for bit in mask], "<f4"),
        version_runs=wire.column([4, sum(mask)], "<i4"),
        turns=turns,
        reward=0.0,
        reward_parts={},
        success=False,
        end="terminated",
        messages=[wire.EpisodeMessage(role="user", content="go")],
    )


def whole(episode: int = 0) -> wire.Trajectory:
    return make_trajectory(episode, [make_turn(1, "A"), make_turn(4, "B")])


def make_group(*trajectories: wire.Trajectory, pools: list[str] | None = None) -> wire.Group:
    return wire.Group(
        ticket=1, domain="d", task_index=0, min_version=0, hub="h", deliveries=1,
        pools=pools or ["default"], trajectories=list(trajectories),
    )  # fmt: skip


def score(group: wire.Group, *values: Value, reward: RewardConfig = STEPS) -> wire.Group:
    """Return the group with these values of its episodes."""
    scoring = GroupScoring(group, [reward], 0)
    asks = scoring.start()
    for ask, value in zip(asks, values, strict=True):
        assert isinstance(ask, ScoreAction)
        actions = scoring.scored(ask, value)
    (forward,) = actions
    assert isinstance(forward, ForwardAction)
    return codec.decode(codec.encode(forward.group), wire.Group)


def test_scores_go_to_turns_and_add_up() -> None:
    (scored,) = score(make_group(whole()), [1.0, 2.0]).trajectories
    assert [turn.reward for turn in scored.turns] == [0.5, 1.0]
    assert (scored.reward, scored.reward_parts, scored.success) == (1.5, {"steps": 3.0}, True)
    assert scored.messages == []
    # a number is the last turn's, as before
    (plain,) = score(make_group(whole()), 3.0).trajectories
    assert [turn.reward for turn in plain.turns] == [0.0, 0.0]
    assert (plain.reward, token_rewards(plain).tolist()) == (1.5, [0, 0, 0, 1.5])


def test_messages_and_row_stay_until_the_last_pool() -> None:
    row = {"level": 1}
    group = msgspec.structs.replace(make_group(whole(), pools=["default", "slow"]), row=row)
    passed = score(group, [0.0, 0.0])
    assert [message.content for message in passed.trajectories[0].messages] == ["go"]
    assert passed.row == row
    scored = score(msgspec.structs.replace(group, pools=["default"]), [0.0, 0.0])
    assert (scored.trajectories[0].messages, scored.row) == ([], {})


def test_scores_of_an_episode_in_several_samples_go_to_each() -> None:
    parts = [make_trajectory(3, [make_turn(1, anchor)]) for anchor in "ABC"]
    scored = score(make_group(*parts), [1.0, 2.0, 4.0]).trajectories
    assert [turn.reward for part in scored for turn in part.turns] == [0.5, 1.0, 2.0]
    assert [part.reward for part in scored] == [3.5] * 3


def test_a_list_needs_a_number_for_each_turn() -> None:
    assert check_scored(Scored([1, np.float64(2)], {"n": 1}), 2) == Scored([1.0, 2.0], {"n": 1.0})
    with pytest.raises(InvalidScoreError, match="a number for each of the 2 turns, got 3"):
        check_scored([1.0, 2.0, 3.0], 2)
    with pytest.raises(InvalidScoreError, match="turn 1 must be finite, got nan"):
        check_scored([1.0, float("nan")], 2)


@pytest.mark.parametrize(("value", "is_used"), [([1.0, 2.0], True), ([1.0], False)])
def test_scores_ahead_of_the_group_count_if_they_fit(value: Value, is_used: bool) -> None:
    ahead = wire.EpisodeScores(
        episode=0,
        rewards=rewards_digest([STEPS]),
        scores=[wire.RewardScore(reward="steps", value=value)],
    )
    group = msgspec.structs.replace(make_group(whole()), scores=[ahead])
    (action,) = GroupScoring(group, [STEPS], 0).start()
    assert isinstance(action, ForwardAction) == is_used
    if isinstance(action, ForwardAction):
        assert [turn.reward for turn in action.group.trajectories[0].turns] == [0.5, 1.0]
    # what goes back to the environment hub for later pools
    assert add_turn_scores([0.25, 0.0], {0: Scored([1.0, 2.0])}, [STEPS]) == [0.75, 1.0]


def test_no_score_of_a_turn_is_infinite() -> None:
    bad = wire.RewardScore(reward="steps", value=[1.0, float("inf")])
    with pytest.raises(WireError, match=r"RewardScore\.value"):
        checks.check(wire.EpisodeScoreReply(scores=[bad]))


def test_gamma_discounts_the_scores_of_turns() -> None:
    scored = score(make_group(whole()), [1.0, 2.0]).trajectories
    algorithm = AlgorithmSection(adv_estimator="reinforce", gamma=0.5)
    (advantages,) = reinforce.estimate(scored, algorithm)
    # from the end: 1; 0.5 * 1; 0.5 + 0.5 * 0.5; 0.5 * 0.75
    assert advantages.tolist() == [0, 0.375, 0.75, 0, 0.5, 1.0]


def test_gae_reads_the_scores_of_turns() -> None:
    (scored,) = score(make_group(whole()), [1.0, 2.0]).trajectories
    rewards = token_rewards(scored)
    assert rewards.tolist() == [0, 0.5, 0, 1.0]
    values = np.array([1.0, 0.5, 0.25, 0.5])
    # deltas: 0 + 0.25 - 1, 0.5 + 0.125 - 0.5, 0 + 0.25 - 0.25, 1 - 0.5. From the end:
    # 0.5; 0 + 0.25 * 0.5; 0.125 + 0.25 * 0.125; -0.75 + 0.25 * 0.15625
    advantages = gae.generalized_advantages(rewards, values, gamma=0.5, lam=0.5)
    assert advantages.tolist() == [-0.7109375, 0.15625, 0.125, 0.5]
    algorithm = AlgorithmSection(adv_estimator="gae", gamma=0.5, gae_lambda=0.5)
    (estimate,) = gae.estimate([BatchRow(1, rewards, values)], algorithm)
    assert estimate.returns is not None
    assert estimate.returns.tolist() == (advantages + values).tolist()


@pytest.mark.parametrize("is_split", [False, True])
def test_gigpo_compares_the_scores_of_turns(is_split: bool) -> None:
    trajectories = [whole(0), whole(1)]
    if is_split:
        trajectories = [
            make_trajectory(episode, [make_turn(1, anchor)])
            for episode in (0, 1)
            for anchor in "AB"
        ]
    weight_one = RewardConfig(name="my.py:steps")
    scored = score(make_group(*trajectories), [1.0, 0.0], [0.0, 1.0], reward=weight_one)
    algorithm = AlgorithmSection(
        adv_estimator="gigpo", gamma=0.5, norm_std=False, step_advantage_w=2.0
    )
    advantages = gigpo.estimate(scored.trajectories, algorithm)
    # both episodes get 1 in all. Returns at A: 1 and 0.5, at B: 0 and 1
    by_turn = [
        float(values[turn.start])
        for values, trajectory in zip(advantages, scored.trajectories, strict=True)
        for turn in trajectory.turns
    ]
    assert by_turn == [0.5, -1.0, -0.5, 1.0]
