"""Where a group goes and what its reward becomes, without a broker; any order of answers and
failures gives the same.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.contract import codec, wire
from broker.contract.streams import EPISODES, EVALS, MAX_DELIVERIES, SAMPLES
from broker.settings.config import DomainSection, RewardConfig
from rewardhub.config import reward_labels
from rewardhub.episode_samples import sample_of
from rewardhub.rewards.base import Scored, Value
from rewardhub.routing import (
    CloseAction,
    ForwardAction,
    GroupScoring,
    ScoreAction,
    find_refusal,
    rewards_digest,
)

REWARDS = [
    RewardConfig(name="math_answer", weight=2.0),
    RewardConfig(name="my.py:style", weight=0.5, pool="slow"),
    RewardConfig(name="my.py:length", weight=-1.0),
]


def trajectory(
    episode: int = 0,
    reward: float = 0.0,
    parts: dict[str, float] | None = None,
    success: bool = False,
) -> wire.Trajectory:
    return wire.Trajectory(
        episode=episode,
        token_ids=wire.column([5, 6, 7], "<i4"),
        loss_mask=wire.column([0, 1, 1], "|u1"),
        logprobs=wire.column([0, -1, -2], "<f4"),
        version_runs=wire.column([4, 2], "<i4"),
        turns=[
            wire.Turn(start=1, end=3, reward=reward, valid=True, finish_reason="stop", server="r1")
        ],
        reward=reward,
        reward_parts=parts or {},
        success=success,
        end="terminated",
        response=f"answer {episode}",
        metrics={"moves": 3.0},
    )


def group(pools: list[str], *trajectories: wire.Trajectory, eval_step: int = -1) -> wire.Group:
    return wire.Group(
        ticket=9, domain="qa", task_index=4, min_version=0, hub="e1", deliveries=1, pools=pools,
        trajectories=list(trajectories) or [trajectory(0), trajectory(1)], prompt="question", reference="ref",
        eval_step=eval_step,
    )  # fmt: skip


def finish(
    scoring: GroupScoring, values: Mapping[tuple[int, int], Value | Scored]
) -> ForwardAction:
    asks = scoring.start()
    for ask in asks:
        assert isinstance(ask, ScoreAction)
        actions = scoring.scored(ask, values[ask.trajectory, ask.reward])
    (forward,) = actions
    assert isinstance(forward, ForwardAction)
    assert scoring.ended
    return forward


def test_of_samples_that_share_an_episode_the_last_is_scored_for_all() -> None:
    there = group(["default"], trajectory(0, 0.5), trajectory(0, 0.5), trajectory(1, 0.0))
    forward = finish(GroupScoring(there, REWARDS[:1], 2), {(1, 0): 1.0, (2, 0): 0.0})
    assert [one.reward for one in forward.group.trajectories] == [2.5, 2.5, 0.0]
    assert [one.success for one in forward.group.trajectories] == [True, True, False]


def test_rewards_of_this_pool_are_added_by_weight_and_the_group_goes_to_the_next() -> None:
    forward = finish(
        GroupScoring(group(["default", "slow"], trajectory(0), trajectory(1)), REWARDS, 2),
        {(0, 0): 1.0, (0, 2): 3.0, (1, 0): 0.0, (1, 2): 5.0},
    )
    assert (forward.stream, forward.key) == (EPISODES, "slow")
    assert forward.group.pools == ["slow"]
    first, second = forward.group.trajectories
    assert (first.reward, first.reward_parts, first.success) == (
        2.0 - 3.0,
        {"math_answer": 1.0, "length": 3.0},
        True,
    )
    assert (second.reward, second.reward_parts, second.success) == (
        -5.0,
        {"math_answer": 0.0, "length": 5.0},
        False,
    )
    # The next pool adds to it and leaves success alone, which the first reward decided.
    last = finish(
        GroupScoring(forward.group, REWARDS, 2), {(0, 1): {"short": 1.0, "calm": 2.0}, (1, 1): 4.0}
    )
    assert (last.stream, last.key, last.group.pools) == (SAMPLES, "", [])
    first, second = last.group.trajectories
    assert (first.reward, first.success) == (0.5, True)
    assert first.reward_parts == {
        "math_answer": 1.0,
        "length": 3.0,
        "style/short": 1.0,
        "style/calm": 2.0,
    }
    assert (second.reward, second.reward_parts["style"], second.success) == (-3.0, 4.0, False)


def test_notes_are_shown_and_count_nothing() -> None:
    values: dict[tuple[int, int], Value | Scored] = {
        (0, 0): Scored(0.5, {"compiled": 1.0}),
        (0, 2): Scored({"a": 1.0, "b": 2.0}, {"c": 9.0}),
    }
    first = finish(
        GroupScoring(group(["default"], trajectory(0)), REWARDS, 2), values
    ).group.trajectories[0]
    assert (first.reward, first.success) == (2.0 * 0.5 - 3.0, False)
    assert first.reward_parts == {
        "math_answer": 0.5,
        "math_answer/compiled": 1.0,
        "length/a": 1.0,
        "length/b": 2.0,
        "length/c": 9.0,
    }


def test_everything_else_about_the_group_stays() -> None:
    before = group(["default"])
    after = finish(GroupScoring(before, REWARDS[:1], 0), {(0, 0): 1.0, (1, 0): 1.0}).group
    restored = msgspec.structs.replace(after, pools=before.pools, trajectories=before.trajectories)
    assert restored == before
    for old, new in zip(before.trajectories, after.trajectories, strict=True):
        assert (
            msgspec.structs.replace(
                new, reward=old.reward, reward_parts=old.reward_parts, success=old.success
            )
            == old
        )
    codec.encode(after)


def test_an_environment_with_a_reward_of_its_own_decides_success() -> None:
    mine = trajectory(0, reward=1.0, parts={"env": 1.0}, success=False)
    scored = finish(
        GroupScoring(group(["default"], mine), REWARDS[:1], 0), {(0, 0): 1.0}
    ).group.trajectories[0]
    assert (scored.reward, scored.success, scored.reward_parts) == (
        3.0,
        False,
        {"env": 1.0, "math_answer": 1.0},
    )


def test_an_evaluation_ends_in_its_own_log() -> None:
    assert (
        finish(
            GroupScoring(group(["default"], eval_step=0), REWARDS[:1], 0), {(0, 0): 1, (1, 0): 0}
        ).stream
        is EVALS
    )


def test_a_pool_without_rewards_passes_the_group_on() -> None:
    (forward,) = GroupScoring(group(["other", "slow"]), REWARDS, 0).start()
    assert isinstance(forward, ForwardAction)
    assert forward.group == group(["slow"])


def test_a_failure_is_tried_again_a_bounded_number_of_times_and_then_closes() -> None:
    scoring = GroupScoring(group(["default"], trajectory(7)), REWARDS[:1], 2)
    assert scoring.start() == [ScoreAction(0, 0, 0)]
    assert scoring.failed(ScoreAction(0, 0, 0), "slow", retry=True) == [ScoreAction(0, 0, 1)]
    assert scoring.failed(ScoreAction(0, 0, 1), "slow", retry=True) == [ScoreAction(0, 0, 2)]
    assert scoring.failed(ScoreAction(0, 0, 2), "slow", retry=True) == [
        CloseAction("reward_error", "episode 7: slow (after 3 tries)", own=False)
    ]
    assert scoring.num_retries == 2
    assert scoring.scored(ScoreAction(0, 0, 2), 1.0) == []


def test_what_cannot_go_better_closes_at_once() -> None:
    scoring = GroupScoring(group(["default"]), REWARDS[:1], 2)
    scoring.start()
    assert scoring.failed(ScoreAction(1, 0), "nan", retry=False) == [
        CloseAction("reward_error", "episode 1: nan")
    ]
    assert scoring.failed(ScoreAction(0, 0), "nan", retry=True) == []


@given(st.data())
def test_any_order_gives_the_same_group_or_exactly_one_closing(data: st.DataObject) -> None:
    pool = data.draw(st.sampled_from(["default", "slow"]))
    rewards = [r for r in REWARDS if r.pool in (pool, "default")] if pool == "slow" else REWARDS
    num, max_retries = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 2))
    before = group([pool], *(trajectory(i) for i in range(num)))
    value = {(t, r): float(7 * t + 3 * r) for t in range(num) for r in range(len(rewards))}
    scoring = GroupScoring(before, rewards, max_retries)
    waiting, endings, failures = list(scoring.start()), [], dict.fromkeys(value, 0)
    while waiting:
        ask = waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
        if not isinstance(ask, ScoreAction):
            endings.append(ask)
            continue
        if data.draw(st.booleans()):
            waiting += scoring.scored(ask, value[ask.trajectory, ask.reward])
        else:
            failures[ask.trajectory, ask.reward] += 1
            waiting += scoring.failed(ask, "x", retry=True)
    (ending,) = endings
    assert max(failures.values()) <= max_retries + 1
    if isinstance(ending, CloseAction):
        assert max(failures.values()) == max_retries + 1
    else:
        undisturbed = finish(GroupScoring(before, rewards, 0), dict(value))
        assert ending == undisturbed


def brought(
    values: Mapping[tuple[int, int], Scored], rewards: list[RewardConfig] = REWARDS
) -> list[wire.EpisodeScores]:
    """Scores by episode and reward, as an environment hub attaches them to a group."""
    labels, digest = reward_labels(rewards), rewards_digest(rewards)
    return [
        wire.EpisodeScores(
            episode=episode,
            rewards=digest,
            scores=[
                wire.RewardScore(reward=labels[r], value=scored.value, notes=scored.notes)
                for (e, r), scored in values.items()
                if e == episode
            ],
        )
        for episode in sorted({episode for episode, _ in values})
    ]


@given(st.data())
def test_scores_that_a_group_brings_along_give_the_same_group_and_are_not_computed_again(
    data: st.DataObject,
) -> None:
    num = data.draw(st.integers(1, 4))
    before = group(["default", "slow"], *(trajectory(i, reward=0.1 * i) for i in range(num)))
    value = {
        (t, r): Scored(0.3 * t + 0.7 * r, {"n": float(t)}) for t in range(num) for r in range(3)
    }
    known = data.draw(st.sets(st.sampled_from(sorted(value))))
    mine = {0, 2}
    without = finish(
        GroupScoring(before, REWARDS, 0), {key: one for key, one in value.items() if key[1] in mine}
    )
    ahead = msgspec.structs.replace(before, scores=brought({key: value[key] for key in known}))
    ahead = codec.decode(codec.encode(ahead), wire.Group)
    scoring = GroupScoring(ahead, REWARDS, 0)
    actions = scoring.start()
    asked = {(one.trajectory, one.reward) for one in actions if isinstance(one, ScoreAction)}
    assert asked == {key for key in value if key[1] in mine} - known
    assert scoring.num_asked == len(asked)
    for one in list(actions):
        if isinstance(one, ScoreAction):
            actions = scoring.scored(one, value[one.trajectory, one.reward])
    (forward,) = actions
    assert isinstance(forward, ForwardAction)
    assert msgspec.structs.replace(forward.group, scores=[]) == without.group
    slow = {key: one for key, one in value.items() if key[1] == 1}
    last = finish(GroupScoring(without.group, REWARDS, 0), slow)
    second = GroupScoring(forward.group, REWARDS, 0)
    todo = second.start()
    while isinstance(todo[0], ScoreAction):
        todo = [*todo[1:], *second.scored(todo[0], value[todo[0].trajectory, 1])]
    assert todo == [last]  # without scores: the record is as it always was


def test_scores_of_other_rewards_are_not_used() -> None:
    changed = [REWARDS[0].model_copy(update={"args": {"strict": False}}), *REWARDS[1:]]
    scores = brought({(0, 0): Scored(1.0), (0, 2): Scored(1.0)}, changed)
    there = msgspec.structs.replace(group(["default"], trajectory(0)), scores=scores)
    assert GroupScoring(there, REWARDS, 0).start() == [ScoreAction(0, 0), ScoreAction(0, 2)]
    unknown = [
        wire.EpisodeScores(episode=5, rewards=rewards_digest(REWARDS), scores=scores[0].scores)
    ]
    there = msgspec.structs.replace(there, scores=unknown)
    assert GroupScoring(there, REWARDS, 0).start() == [ScoreAction(0, 0), ScoreAction(0, 2)]


def test_scores_of_another_hub_do_not_prove_that_a_reward_works_here() -> None:
    there = msgspec.structs.replace(
        group(["default"]), scores=brought({(0, 0): Scored(1.0)}, REWARDS[:1])
    )
    scoring = GroupScoring(there, REWARDS[:1], 0)
    assert scoring.start() == [ScoreAction(1, 0)]
    (close,) = scoring.failed(ScoreAction(1, 0), "no memory", retry=True)
    assert close == CloseAction("reward_error", "episode 1: no memory", own=False)


DOMAINS = {"qa": DomainSection(env="qa", rewards=REWARDS)}


def test_what_is_not_even_begun() -> None:
    assert find_refusal(group(["default"]), "default", DOMAINS, 1) is None
    many = find_refusal(group(["default"]), "default", DOMAINS, MAX_DELIVERIES)
    assert many is not None
    assert many.reason == "too_many_deliveries"
    for wrong, line in (
        (group(["slow"]), "in the queue of pool default, but its pools are ['slow']"),
        (group([]), "in the queue of pool default, but its pools are []"),
        (
            msgspec.structs.replace(group(["default"]), domain="lake"),
            "domain 'lake' is not a domain of the run: qa",
        ),
    ):
        assert find_refusal(wrong, "default", DOMAINS, 1) == CloseAction("malformed", line)


def test_what_a_reward_sees() -> None:
    mine = trajectory(3, 0.5, {"env": 0.5}, success=True)
    seen = sample_of(group(["default"], mine), mine)
    assert (seen.prompt, seen.response, seen.reference, seen.domain, seen.task_index) == (
        "question",
        "answer 3",
        "ref",
        "qa",
        4,
    )
    assert (seen.reward, seen.reward_parts, seen.success, seen.end) == (
        0.5,
        {"env": 0.5},
        True,
        "terminated",
    )
    assert (seen.num_turns, seen.num_tokens, seen.metrics) == (1, 2, {"moves": 3.0})
    both = trajectory(3), trajectory(3)  # of step-independent samples, all of the episode's count
    of_two = sample_of(group(["default"], *both, trajectory(4)), both[1])
    assert (of_two.num_turns, of_two.num_tokens) == (2, 4)


@pytest.mark.parametrize("weight", [0.0, -2.5, 1e6])
def test_weights(weight: float) -> None:
    scored = finish(
        GroupScoring(group(["default"], trajectory()), [RewardConfig(name="m", weight=weight)], 0),
        {(0, 0): 0.25},
    ).group.trajectories[0]
    assert (scored.reward, scored.reward_parts) == (weight * 0.25, {"m": 0.25})
