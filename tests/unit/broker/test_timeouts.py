"""The chain of timeouts: a turn < an episode < a group < a ticket; derived outward, bounded by what
is set, never contradicting.
"""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.errors import ConfigError
from broker.settings.run_settings import RunSettings
from broker.settings.runspec import check_settings, validate
from broker.settings.timeouts import derive, note, release
from learner.prepare import to_yaml

LAKE: dict[str, Any] = {
    "env": "frozenlake",
    "group_size": 8,
    "max_context_tokens": 256,
    "sampling": {"max_tokens": 4},
    "max_turns": 10,
}
MATH: dict[str, Any] = {
    "env": "qa",
    "group_size": 4,
    "max_context_tokens": 40_000,
    "sampling": {"max_tokens": 32_768},
}


def chain(config: dict[str, Any]) -> tuple[float, ...]:
    hub, train = config["envhub"], config["train"]
    deadlines = [domain["deadline_s"] for domain in config["domains"].values()]
    return (
        hub["generate_timeout_s"],
        hub["episode_timeout_s"],
        *deadlines,
        train["ticket_timeout_s"],
        config["eval"]["timeout_s"],
    )


def checked(*, domain: dict[str, Any] | None = None, **sections: Any) -> tuple[float, ...]:
    return chain(validate({"domains": {"lake": {**LAKE, **(domain or {})}}, **sections}))


def test_each_is_derived_from_the_next_inner_one() -> None:
    # 10 turns of 120 + 30 s and two more calls of the environment; one wave of 8 episodes and one
    # more; twice that.
    assert checked() == (120, 1560, 3120, 6240, 6240)


def test_long_outputs_and_slow_servers_take_longer() -> None:
    long: dict[str, Any] = {
        "max_context_tokens": 40_000,
        "sampling": {"max_tokens": 32_768},
        "max_turns": 1,
    }
    roomy: dict[str, Any] = {
        "rollout": {"max_context_tokens": 40_000},
        "train": {"micro_batch_tokens": 40_000},
        "model": {"tiny": {"max_position_embeddings": 40_000}},
    }
    # 32,768 tokens at 10 a second; 30 s for each of three calls
    assert checked(domain=long, **roomy)[:2] == (3276.8, 3366.8)
    assert checked(domain=long, envhub={"min_tokens_per_s": 2.0}, **roomy)[:2] == (16_384, 16_474)


def test_a_group_larger_than_the_hub_runs_in_waves() -> None:
    assert checked(envhub={"n": 3})[2] == 4 * 1560  # 8 episodes in 3 waves, and one more
    assert checked(domain={"group_size_redundancy": 2}, envhub={"n": 8})[2] == 3 * 1560
    assert checked(envhub={"n": 8}, algorithm={"adv_estimator": "remax"})[2] == 3 * 1560


def test_a_ticket_waits_for_the_rewards_of_its_group() -> None:
    # 16 groups of 8 in one hub, 128 scores by 2 workers, each 3 tries of 10 s: 1,920 s; in another
    # pool 4 workers' worth less.
    math = {"name": "math_answer"}
    assert checked(domain={"rewards": [math]})[3] == 2 * (3120 + 1920)
    assert checked(domain={"rewards": [math, math]})[3] == 2 * (3120 + 3840)
    assert checked(domain={"rewards": [math, {**math, "pool": "b"}]}, rewardhub={"workers": 4})[
        3
    ] == 2 * (3120 + 960 + 960)
    judge = {
        "name": "judge",
        "args": {"base_url": "http://h/v1", "timeout_s": 50, "max_concurrency": 32},
    }
    assert checked(domain={"rewards": [judge]})[3] == 2 * (3120 + 4 * 150)


def test_what_is_set_bounds_what_is_derived_inside_it() -> None:
    assert checked(domain={"deadline_s": 60}) == (60, 60, 60, 120, 600)
    assert checked(domain={"deadline_s": 500}) == (120, 500, 500, 1000, 1000)
    assert checked(train={"ticket_timeout_s": 1000}) == (120, 500, 500, 1000, 1000)
    assert checked(envhub={"episode_timeout_s": 100}) == (100, 100, 200, 400, 600)
    assert checked(envhub={"generate_timeout_s": 5}) == (5, 410, 820, 1640, 1640)
    assert checked(envhub={"episode_timeout_s": 300}, train={"ticket_timeout_s": 400}) == (
        120,
        300,
        300,
        400,
        600,
    )


def test_the_hub_takes_the_longest_of_all_domains() -> None:
    rest = {"deadline_s": None, "group_size_redundancy": 0}
    domains = {"lake": LAKE | rest, "math": MATH | rest | {"max_turns": 1}}
    config: dict[str, Any] = {"domains": domains, "algorithm": {"adv_estimator": "grpo"}}
    config |= {
        "envhub": {
            "n": 64,
            "step_timeout_s": 30,
            "min_tokens_per_s": 10.0,
            "generate_timeout_s": None,
            "episode_timeout_s": None,
        }
    }
    config |= {"train": {"ticket_timeout_s": None}, "eval": {"timeout_s": None}}
    derived = derive(RunSettings.of_config(config), {"math": 100.0})
    assert chain(derived.to_plain()) == (3276.8, 3366.8, 3120, 6733.6, 2 * 6833.6, 2 * 6833.6)


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        (
            {"envhub": {"generate_timeout_s": 400, "episode_timeout_s": 300}},
            "envhub.generate_timeout_s: 400.0 is not allowed; at most envhub.episode_timeout_s, which is 300",
        ),
        (
            {
                "envhub": {"episode_timeout_s": 300},
                "domains": {"lake": {**LAKE, "deadline_s": 200}},
            },
            "envhub.episode_timeout_s: 300.0 is not allowed; at most domains.lake.deadline_s, which is 200",
        ),
        (
            {
                "envhub": {"generate_timeout_s": 300},
                "domains": {
                    "lake": {**LAKE, "deadline_s": 200},
                    "pond": {**LAKE, "deadline_s": 250},
                },
            },
            "envhub.generate_timeout_s: 300.0 is not allowed; at most domains.pond.deadline_s, the longest, which is "
            "250",
        ),
        (
            {"train": {"ticket_timeout_s": 200}, "domains": {"lake": {**LAKE, "deadline_s": 200}}},
            "train.ticket_timeout_s: 200.0 is not allowed; above domains.lake.deadline_s, which is 200",
        ),
        (
            {"train": {"ticket_timeout_s": 200}, "envhub": {"episode_timeout_s": 300}},
            "train.ticket_timeout_s: 200.0 is not allowed; above envhub.episode_timeout_s, which is 300",
        ),
    ],
)
def test_a_contradiction_names_both_keys_and_values(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate({"domains": {"lake": LAKE}, **sections})
    assert str(caught.value) == says


def test_one_short_deadline_among_several_domains_is_no_contradiction() -> None:
    domains = {"lake": {**LAKE, "deadline_s": 100}, "pond": LAKE}
    assert chain(validate({"domains": domains, "envhub": {"episode_timeout_s": 300}}))[:4] == (
        120,
        300,
        100,
        600,
    )


maybe = st.none() | st.floats(1, 1e5).map(lambda value: round(value, 1))


@settings(deadline=None)
@given(
    turn=maybe,
    episode=maybe,
    first=maybe,
    second=maybe,
    ticket=maybe,
    n=st.integers(1, 64),
    turns=st.integers(1, 50),
)
def test_the_chain_holds_and_a_resolved_configuration_resolves_to_itself(
    turn: float | None,
    episode: float | None,
    first: float | None,
    second: float | None,
    ticket: float | None,
    n: int,
    turns: int,
) -> None:
    sections: dict[str, Any] = {
        "domains": {
            "lake": {**LAKE, "max_turns": turns, "deadline_s": first},
            "pond": {**LAKE, "deadline_s": second},
        },
        "envhub": {"generate_timeout_s": turn, "episode_timeout_s": episode, "n": n},
        "train": {"ticket_timeout_s": ticket},
    }
    try:
        config = validate(sections)
    except ConfigError:
        return
    turn_s, episode_s, *deadlines, ticket_s, evaluation_s = chain(config)
    assert turn_s <= episode_s <= max(deadlines) < ticket_s <= evaluation_s
    for given_s, resolved in zip(
        (turn, episode, first, second, ticket),
        (turn_s, episode_s, *deadlines, ticket_s),
        strict=True,
    ):
        assert given_s is None or resolved == given_s
    assert validate(config) == config
    assert validate(yaml.safe_load(to_yaml(config))) == config


def test_the_chain_in_one_line() -> None:
    said = note(check_settings({"domains": {"lake": LAKE, "pond": {**LAKE, "deadline_s": 100}}}))
    assert said.startswith(
        "timeouts: a turn 120 s, an episode 1560 s, a group 100 or 3120 s, a ticket 6240 s in one hub"
    )


def test_a_resolved_configuration_derives_again_what_was_derived() -> None:
    """But what was set stays set, although its value is all that tells."""
    long = {**LAKE, "max_turns": 3, "deadline_s": 9000.0}
    own = {"domains": {"lake": LAKE, "long": long}, "envhub": {"step_timeout_s": 7.0}}
    whole = check_settings(own)
    released = release(whole, {}).to_plain()
    assert chain(released) == (None, None, None, 9000.0, None, None)
    assert check_settings(released) == whole
    bounded = check_settings({"domains": {"lake": LAKE}, "train": {"ticket_timeout_s": 60.0}})
    released = release(bounded, {}).to_plain()
    assert chain(released) == (None, None, None, 60.0, None)
    assert check_settings(released) == bounded
