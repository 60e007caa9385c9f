"""From groups to training samples: streamed or as a whole, and what the models are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from test_more_advantages import trajectory

from broker.contract import wire
from broker.settings.registry import resolve
from learner.algorithm.advantages import ADVANTAGES
from learner.algorithm.assembly import SampleAssembler, scores_needed
from learner.algorithm.samples import SampleScores, TrainSample
from learner.algorithm.selection import most_varied
from learner.algorithm_checks import estimators_with
from learner.config import AlgorithmSection, CriticSection, RewardNormalization


def group(ticket: int, rewards: list[float], **more: Any) -> wire.Group:
    trajectories = [
        trajectory([(1, 3, 0.0, "A"), (4, 5, r, "B")], 6, episode=i) for i, r in enumerate(rewards)
    ]
    plain = wire.Group(
        ticket=ticket,
        domain="lake",
        task_index=0,
        min_version=0,
        hub="h",
        deliveries=1,
        pools=[],
        trajectories=trajectories,
    )
    return msgspec.structs.replace(plain, **more)


GROUPS = [group(1, [1.0, 0.0]), group(2, [0.0, 0.0]), group(3, [4.0, 0.0])]


def assembly(name: str = "grpo", *, stream: bool = True, **settings: Any) -> SampleAssembler:
    section = AlgorithmSection(adv_estimator=name, **settings)
    return SampleAssembler(resolve("advantages", name, ADVANTAGES), section, stream=stream)


def constant(**columns: float) -> Any:
    """Every token has the same scores; remembers what it was asked."""

    def score(samples: Sequence[TrainSample]) -> list[SampleScores]:
        return [
            SampleScores(
                **{
                    name: np.full(one.num_tokens, value, np.float32)
                    for name, value in columns.items()
                }
            )
            for one in samples
        ]

    return score


def trained(samples: Sequence[TrainSample]) -> list[list[float]]:
    return [one.advantages[one.positions].tolist() for one in samples]


@pytest.mark.parametrize("name", sorted(set(ADVANTAGES) - set(estimators_with("whole_batch"))))
def test_a_whole_step_gives_what_streaming_gives(name: str) -> None:
    settings: dict[str, Any] = {"reward_clip": 3.0, "advantage_clip": 0.6, "format_penalty": 0.1}
    streamed = [one for each in GROUPS for one in assembly(name, **settings).stream(each)]
    whole = assembly(name, stream=False, **settings).batch(GROUPS)
    assert len(streamed) == len(whole) == 6
    for a, b in zip(streamed, whole, strict=True):
        for column in ("token_ids", "loss_mask", "rollout_logprobs", "versions", "advantages"):
            assert np.array_equal(getattr(a, column), getattr(b, column))
        assert (a.group, a.temperature) == (b.group, b.temperature)


def test_what_waits_for_the_whole_step() -> None:
    assert not assembly().needs_batch
    assert all(
        assembly(name, critic=CriticSection(enabled=name == "gae")).needs_batch
        for name in estimators_with("whole_batch")
    )
    reasons: list[dict[str, Any]] = [
        {"num_epochs": 2},
        {"num_minibatches": 2},
        {"whiten_advantages": True},
        {"pg_variant": "starpo_s"},
        {"kl_coef": 0.1, "kl_placement": "reward"},
        {"reward_normalization": RewardNormalization(grouping="batch", norm_mean_type="group")},
    ]
    assert all(assembly(**reason).needs_batch for reason in reasons)
    assert assembly(stream=False).needs_batch
    assert not assembly(
        kl_coef=0.1, correction="tis", advantage_clip=1.0, mask_truncated=True
    ).needs_batch


def test_when_the_models_are_asked() -> None:
    # one update: its own forward pass is the proximal policy
    assert not scores_needed(AlgorithmSection(correction="tis"))
    assert scores_needed(AlgorithmSection(correction="tis", num_minibatches=2))
    assert not scores_needed(
        AlgorithmSection(correction="tis", num_minibatches=2, prox_logp_method="interpolate")
    )
    assert not scores_needed(AlgorithmSection(num_epochs=2))
    assert scores_needed(AlgorithmSection(kl_coef=0.1, kl_placement="reward"))
    assert scores_needed(AlgorithmSection(critic=CriticSection(enabled=True)))
    assert not scores_needed(AlgorithmSection(correction="opsm", num_minibatches=2, bypass=True))
    assert scores_needed(AlgorithmSection(pg_variant="clip_cov"))


def test_kl_in_the_reward_of_a_group_by_hand() -> None:
    # Three tokens a trajectory, kl 0.5 nats each with a coefficient of 0.2: 0.3 off every reward,
    # which the group's mean takes back. For reinforce++ each token pays its own 0.1; returns of
    # rewards 1 and 0: 0.7, 0.8, 0.9 and -0.3, -0.2, -0.1.
    section: dict[str, Any] = {"kl_coef": 0.2, "kl_placement": "reward"}
    found = assembly("grpo", norm_std=False, **section).batch(
        [group(1, [1.0, 0.0])], constant(kl=0.5), 0.2
    )
    assert trained(found) == [pytest.approx([0.5] * 3), pytest.approx([-0.5] * 3)]
    found = assembly("reinforce", **section).batch([group(1, [1.0, 0.0])], constant(kl=0.5), 0.2)
    # by turns: 0.2 off the first, 0.1 off the second
    assert trained(found)[0] == pytest.approx([0.7, 0.7, 0.9])
    found = assembly("reinforce++", **section).batch([group(1, [1.0, 0.0])], constant(kl=0.5), 0.2)
    returns = np.array([0.7, 0.8, 0.9, -0.3, -0.2, -0.1])
    assert np.concatenate(trained(found)) == pytest.approx(
        (returns - returns.mean()) / returns.std(ddof=1), abs=1e-6
    )


def test_the_critics_columns_reach_the_samples() -> None:
    # gamma and lambda 1: targets are returns, 1 on every token of the good one, whatever the values
    # are.
    found = assembly("gae", critic=CriticSection(enabled=True)).batch(
        [group(1, [1.0, 0.0])], constant(values=0.25, logprobs=-2.0)
    )
    for one, target in zip(found, (1.0, 0.0), strict=True):
        assert one.values is not None
        assert one.returns is not None
        assert one.proximal_logprobs is not None
        assert one.values[one.positions].tolist() == [0.25] * 3
        assert one.returns[one.positions].tolist() == pytest.approx([target] * 3)
        assert one.proximal_logprobs[one.positions].tolist() == [-2.0] * 3


def test_whitening_is_over_trained_tokens_and_before_the_clip() -> None:
    # Advantages 0.5 and -0.5 on three tokens each: std sqrt(6 * 0.25 / 5) = 0.5477226, so
    # +-0.9128709; the clip at 0.9 comes after.
    settings: dict[str, Any] = {"norm_std": False, "whiten_advantages": True}
    assert trained(assembly(**settings).batch([group(1, [1.0, 0.0])]))[0] == pytest.approx(
        [0.9128709] * 3
    )
    assert trained(assembly(**settings, advantage_clip=0.9).batch([group(1, [1.0, 0.0])]))[
        0
    ] == pytest.approx([0.9] * 3)


def test_truncated_samples_count_in_the_mean_and_are_not_trained() -> None:
    cut = group(1, [1.0, 0.0])
    cut.trajectories[1] = msgspec.structs.replace(cut.trajectories[1], end="length")
    for found in (
        assembly(norm_std=False, mask_truncated=True).stream(cut),
        assembly(stream=False, mask_truncated=True).batch([cut]),
    ):
        assert [one.num_tokens for one in found] == [3, 0]
        assert found[0].advantages.any()
    assert [one.num_tokens for one in assembly().stream(cut)] == [3, 3]


def test_greedy_baselines_are_never_trained_on() -> None:
    baseline = group(1, [1.0, 0.0, 0.25])
    baseline.trajectories[2] = msgspec.structs.replace(baseline.trajectories[2], greedy=True)
    for found in (
        assembly("remax").stream(baseline),
        assembly("remax", stream=False).batch([baseline]),
    ):
        assert [one.num_tokens for one in found] == [3, 3, 0]
        assert trained(found)[:2] == [[0.75] * 3, [-0.25] * 3]


def test_a_greedy_baseline_pays_for_its_divergence_as_the_others_do() -> None:
    # Rewards 1, 0 and greedy 0.25, three tokens each. Divergences of 0.5, 1, 0.75 nats a token at
    # 0.2: 0.3, 0.6, 0.45 off the rewards. So 0.7, -0.6 against -0.2. A baseline that paid nothing
    # would leave every advantage too low by what the policy has moved so far.
    asked = group(1, [1.0, 0.0, 0.25])
    asked.trajectories[2] = msgspec.structs.replace(asked.trajectories[2], greedy=True)

    def score(samples: Sequence[TrainSample]) -> list[SampleScores]:
        return [
            SampleScores(kl=np.full(one.num_tokens, kl, np.float32))
            for one, kl in zip(samples, (0.5, 1.0, 0.75), strict=True)
        ]

    found = assembly("remax", kl_coef=0.2, kl_placement="reward").batch([asked], score, 0.2)
    assert trained(found) == [pytest.approx([0.9] * 3), pytest.approx([-0.4] * 3), []]


def test_tokens_are_selected_over_the_whole_step() -> None:
    # Twelve tokens. Six have advantages 0.5 and -0.5, and logprobs -1 and -2: means 0 and -1.5, so
    # covariances of 0.25. The rows of group 2 have no advantage. Half of twelve: these six.
    def score(samples: Sequence[TrainSample]) -> list[SampleScores]:
        return [
            SampleScores(logprobs=np.full(3, value, np.float32))
            for value, _ in zip((-1.0, -2.0, -1.5, -1.5), samples, strict=True)
        ]

    settings: dict[str, Any] = {"pg_variant": "kl_cov", "norm_std": False, "cov_share": 0.5}
    own = assembly(**settings)
    assert own.needs_batch
    assert own.needs_scores
    found = own.batch([group(1, [1.0, 0.0]), group(2, [0.0, 0.0])], score)
    assert [one.selected.sum() for one in found if one.selected is not None] == [3, 3, 0, 0]
    assert assembly().batch(GROUPS)[0].selected is None


def test_energies_reach_the_estimator() -> None:
    # Equal energies: the plain mean of the returns of 1 and 0.
    own = assembly("optimal_token_baseline")
    assert own.needs_batch
    assert own.needs_scores
    found = own.batch([group(1, [1.0, 0.0])], constant(energies=0.5, logprobs=-1.0))
    assert trained(found) == [pytest.approx([0.5] * 3), pytest.approx([-0.5] * 3)]


def test_starpo_s_trains_on_the_most_varied_groups_alone() -> None:
    found = assembly(pg_variant="starpo_s").batch(most_varied(GROUPS, 0.3))
    assert [one.group for one in found] == [3, 3]


def test_a_trajectory_without_tokens_passes_through() -> None:
    empty = group(1, [1.0, 0.0])
    empty.trajectories[1] = trajectory([], 4, total=0.5)
    for name in ("gae", "reinforce++", "reinforce++_baseline", "grpo", "reinforce"):
        found = assembly(name, stream=False, critic=CriticSection(enabled=True)).batch(
            [empty], constant(values=0.0)
        )
        assert [one.num_tokens for one in found] == [3, 0]


def seated(ticket: int, rewards: dict[str, list[float]]) -> wire.Group:
    """A group whose episodes have a sample of each seat."""
    plain = group(ticket, [reward for own in rewards.values() for reward in own])
    seats = [seat for seat, own in rewards.items() for _ in own]
    return msgspec.structs.replace(
        plain,
        trajectories=[
            msgspec.structs.replace(each, seat=seat)
            for each, seat in zip(plain.trajectories, seats, strict=True)
        ],
    )


@pytest.mark.parametrize("name", ["dr_grpo", "gpg"])
def test_seats_are_compared_with_themselves(name: str) -> None:
    won_by_x = seated(1, {"X": [1.0, 1.0, 0.0], "O": [-1.0, -1.0, 0.0]})
    whole = assembly(name, stream=False, norm_std=False)
    own = trained(whole.batch([won_by_x]))
    alone = [
        trained(whole.batch([group(1, rewards)]))
        for rewards in ([1.0, 1.0, 0.0], [-1.0, -1.0, 0.0])
    ]
    if name == "dr_grpo":
        assert own == [*alone[0], *alone[1]]
        np.testing.assert_allclose(
            [row[-1] for row in own], [1 / 3, 1 / 3, -2 / 3, -1 / 3, -1 / 3, 2 / 3]
        )
    shared = assembly(name, stream=False, norm_std=False, seat_baseline="shared")
    mixed = trained(shared.batch([won_by_x]))
    assert mixed == trained(shared.batch([group(1, [1.0, 1.0, 0.0, -1.0, -1.0, 0.0])]))
    assert mixed != own
