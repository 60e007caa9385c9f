"""Warnings about missing learning signal: when they begin, when they are taken back, and what they
say.
"""

from __future__ import annotations

from typing import Any

import pytest

from learner.reporting.training_signals import OVER_AFTER, RULES, TrainingWarnings, active_warnings

GOOD = {
    "reward/min": 0.0, "reward/max": 1.0, "env/success_rate": 0.5, "frac_reward_zero_std": 0.2,
    "response_length/clip_ratio": 0.1,
    "actor/entropy": 1.2, "actor/kl_loss": 0.02, "actor/ppo_kl": 0.001, "actor/grad_norm": 0.7, "actor/skipped": 0.0,
}  # fmt: skip


def line(**changes: float) -> dict[str, Any]:
    """A good line but for these, ``reward_max`` standing for ``reward/max``."""
    names = {name.replace("/", "_"): name for name in GOOD}
    return GOOD | {names[name]: value for name, value in changes.items()}


LOWEST = line(reward_max=0.0, env_success_rate=0.0, frac_reward_zero_std=1.0, actor_grad_norm=0.0)
BAD = {
    "reward": (LOWEST, 10),
    "equal_rewards": (line(frac_reward_zero_std=1.0), 5),
    "clip_ratio": (line(response_length_clip_ratio=0.51), 1),
    "entropy": (line(actor_entropy=0.009), 5),
    "kl": (line(actor_kl_loss=10.5), 1),
    "no_gradient": (line(actor_grad_norm=0.0), 1),
    "not_finite": (
        {
            name: value
            for name, value in line(actor_skipped=1.0).items()
            if name != "actor/grad_norm"
        },
        1,
    ),
}


def test_there_is_a_case_for_each_rule() -> None:
    assert set(BAD) == set(RULES)


@pytest.mark.parametrize("name", BAD)
def test_it_is_said_once_when_it_begins_and_taken_back_when_it_is_over(name: str) -> None:
    bad, after = BAD[name]
    signals = TrainingWarnings()
    told = [signals.take(GOOD) for _ in range(3)] + [signals.take(bad) for _ in range(after + 4)]
    begun = [
        index
        for index, (texts, _) in enumerate(told)
        if any(text.startswith(RULES[name].says[:20].split("{")[0]) for text in texts)
    ]
    assert begun == [3 + after - 1]
    assert name in signals.active
    signals.take(GOOD)
    signals.take(bad)  # it comes back at once: the warning stands
    assert name in signals.active
    over = [name in signals.active for _ in range(OVER_AFTER) if signals.take(GOOD)]
    assert over == [True, True, False]


def test_a_good_run_has_none() -> None:
    assert active_warnings([GOOD] * 50) == []


def test_what_is_not_measured_is_not_warned_of() -> None:
    assert active_warnings([{"step": 1, "reward/mean": 0.0}] * 50) == []
    without = {
        name: value
        for name, value in GOOD.items()
        if name not in ("actor/kl_loss", "actor/entropy", "actor/grad_norm")
    }
    assert active_warnings([without] * 50) == []


def test_a_solved_task_is_not_stuck_at_its_lowest_reward() -> None:
    solved = line(
        reward_min=1.0,
        reward_max=1.0,
        env_success_rate=1.0,
        frac_reward_zero_std=1.0,
        actor_grad_norm=0.0,
    )
    assert [text[:21] for text in active_warnings([solved] * 50)] == ["in the last 5 steps a"]


def test_an_action_of_a_few_tokens_may_be_cut() -> None:
    cut = line(response_length_clip_ratio=1.0) | {"response_length/mean": 12.0}
    assert active_warnings([cut | {"env/num_turns": 4.0}]) == []
    assert len(active_warnings([cut | {"env/num_turns": 1.0}])) == 1


def test_a_reward_that_was_lower_before_is_not_the_lowest() -> None:
    flat = line(reward_min=-0.5, reward_max=-0.5, env_success_rate=0.0)
    assert active_warnings([line(reward_min=-1.0), *[flat] * 50]) == []
    assert active_warnings([GOOD, *[flat] * 50])[0].startswith(
        "every reward of the last 10 steps was the lowest so far, -0.5: "
    )


def test_no_gradient_is_explained_by_equal_rewards() -> None:
    signals = TrainingWarnings()
    for _ in range(20):
        signals.take(LOWEST)
    assert set(signals.active) == {"reward", "equal_rewards"}


def test_the_numbers_are_those_of_the_line() -> None:
    assert active_warnings([line(response_length_clip_ratio=0.75)])[0].startswith(
        "75% of the responses were cut for their length: "
    )
