"""Whom the learner says it waits for, and how often."""

from __future__ import annotations

from broker.settings.config import DomainSection, RewardConfig
from broker.settings.schema.policies import PolicySection
from learner.reporting.missing_roles import MissingRoles, required_roles


def test_who_is_missing_is_said_once_and_again_when_they_came() -> None:
    company, said = MissingRoles("demo"), []
    for now, hub, server, work in [
        (0.0, False, False, False),  # nothing to do: nobody is missed
        (20.0, False, False, True),
        (29.0, False, True, True),
        (30.0, False, True, True),
        (31.0, False, True, True),
        (40.0, True, True, True),
        (41.0, False, True, True),
        (50.0, False, True, True),
        (51.0, False, True, True),
    ]:
        said += [
            (now, line) for line in company.look({"envhub": hub, "rollout": server}, work, now)
        ]
    missing = "waiting: no envhub has joined; start one with `envhub --run demo`"
    assert said == [(30.0, missing), (40.0, "envhub has joined"), (51.0, missing)]


def test_a_wait_is_said_again_at_growing_intervals() -> None:
    company = MissingRoles("demo")
    said = [now for now in range(100) if company.look({"envhub": False}, True, float(now))]
    assert said == [10, 15, 25, 45, 85]
    assert company.missing == ["envhub"]


def test_a_run_with_rewards_needs_a_hub_for_them() -> None:
    plain, judged = (
        DomainSection(env="qa"),
        DomainSection(env="qa", rewards=[RewardConfig(name="math_answer")]),
    )
    assert required_roles({"a": plain}, {}, {}) == ["envhub", "rollout"]
    assert required_roles({"a": plain, "b": judged}, {}, {}) == ["envhub", "rollout", "rewardhub"]


def test_the_servers_of_a_policy_that_plays_are_needed() -> None:
    players = {"past": PolicySection(model_path="m"), "chance": PolicySection(script="random")}
    roles = required_roles({"a": DomainSection(env="x")}, {}, players)
    assert roles == ["envhub", "rollout", "policy past"]
    detector = MissingRoles("r")
    detector.look({"policy past": False}, has_work=True, now=0.0)
    assert detector.look({"policy past": False}, has_work=True, now=99.0) == [
        "waiting: no rollout server of policy past has joined; start one with "
        "`rollout-server --policy past --run r`"
    ]
    company = MissingRoles("demo")
    present = {"envhub": True, "rollout": True, "rewardhub": False}
    assert [company.look(present, True, now) for now in (0.0, 10.0)] == [
        [],
        ["waiting: no rewardhub has joined; start one with `rewardhub --run demo`"],
    ]
