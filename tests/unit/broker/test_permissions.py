"""What each role may do follows from the table of streams."""

from __future__ import annotations

import pytest

from broker.contract.permissions import (
    JOINING,
    OBSERVER,
    OPERATOR,
    Permissions,
    inbox_prefix,
    permissions,
)
from broker.contract.streams import ROLES
from broker.errors import ConfigError


def allows(patterns: tuple[str, ...], subject: str) -> bool:
    """Return whether a NATS subject matches one of the patterns."""
    return any(matches(pattern.split("."), subject.split(".")) for pattern in patterns)


def matches(pattern: list[str], parts: list[str]) -> bool:
    if pattern[-1] == ">":
        return (
            len(parts) >= len(pattern) and matches(pattern[:-1], parts[: len(pattern) - 1])
            if pattern[:-1]
            else True
        )
    return len(pattern) == len(parts) and all(
        a in ("*", b) for a, b in zip(pattern, parts, strict=True)
    )


CREATE = [
    f"$JS.API.{one}"
    for one in ("STREAM.CREATE.rl_r_tickets", "CONSUMER.DURABLE.CREATE.rl_r_tickets.lake")
]
DELETE = [
    f"$JS.API.STREAM.{one}.rl_r_samples" for one in ("DELETE", "UPDATE", "SNAPSHOT", "RESTORE")
]
TRIM = ["$JS.API.STREAM.PURGE.rl_r_samples", "$JS.API.STREAM.MSG.DELETE.rl_r_tickets"]

# subject -> roles that may publish to it, besides the operator
PUBLISHERS = {
    "rl.r.tickets.lake": {"learner"},
    "rl.r.evaltickets.lake": {"learner"},
    "rl.r.episodes.default.tickets-1": {"envhub", "rewardhub"},
    "rl.r.samples": {"envhub", "rewardhub", "learner"},
    "rl.r.weights": {"learner"},
    "rl.r.reserve.0": {"learner"},
    "rl.r.dead.tickets": set(ROLES),
    "rl.r.generate.s1": {"envhub"},
    "rl.r.weightsync.3": {"rollout"},
    "rl.r.reruns.envhub.h1": set[str](),
    "rl.r.metrics.envhub.h1": {"envhub"},
    "rl.r.presence.rollout.s1": {"rollout"},
    "$KV.rl_r_runs.r": {"learner"},
    "$KV.rl_r_control.r": {"learner"},
    "$KV.rl_r_members.r.rollout.s1": {"rollout"},
    "$KV.rl_r_members.r.envhub.h1": {"envhub"},
    "$KV.rl_r_attempts.r.tickets.7": {"envhub"},
    "$KV.rl_r_lengths.r.lake": {"envhub"},
    "$JS.ACK.rl_r_tickets.lake.1.2.3.4.5": {"envhub"},
    "$JS.ACK.rl_r_episodes.default.1.2.3.4.5": {"rewardhub"},
    "$JS.API.CONSUMER.MSG.NEXT.rl_r_tickets.lake": {"envhub", "learner"},
    "$JS.API.CONSUMER.MSG.NEXT.rl_r_episodes.default": {"rewardhub", "learner"},
    "$JS.API.STREAM.MSG.GET.KV_rl_r_runs": set(ROLES),
    "$JS.API.STREAM.MSG.GET.rl_r_samples": {"learner"},
    "$JS.API.CONSUMER.CREATE.rl_r_samples": {"learner"},
    "$JS.API.INFO": {"learner"},
    "$JS.API.STREAM.NAMES": set[str](),
    "$JS.API.STREAM.LIST": set[str](),
    "$SYS.REQ.SERVER.PING": set[str](),
    **{subject: {"learner"} for subject in [*CREATE, *TRIM]},
    **{subject: set[str]() for subject in DELETE},
}
# subject -> roles that may subscribe to it
SUBSCRIBERS = {
    "rl.r.tickets.lake": set[str](),
    "rl.r.samples": set[str](),
    "rl.r.weights": {"learner", "rollout"},
    "rl.r.generate.s1": {"rollout"},
    "rl.r.metrics.envhub.h1": set[str](),
    "rl.r.weightsync.3": {"learner"},
    "rl.r.reruns.envhub.h1": {"envhub"},
    "rl.r.reruns.rewardhub.h1": {"rewardhub"},
    "rl.r.presence.rollout.s1": set(ROLES),
    "$KV.rl_r_control.r": set(ROLES),
    "$KV.rl_r_members.r.envhub.h1": {"envhub", "learner"},
    "$JS.EVENT.ADVISORY.API": set[str](),
}


@pytest.mark.parametrize("subject", PUBLISHERS)
def test_who_may_publish(subject: str) -> None:
    assert {
        role for role in ROLES if allows(permissions(role, "r").publish, subject)
    } == PUBLISHERS[subject]


@pytest.mark.parametrize("subject", SUBSCRIBERS)
def test_who_may_subscribe(subject: str) -> None:
    assert {
        role for role in ROLES if allows(permissions(role, "r").subscribe, subject)
    } == SUBSCRIBERS[subject]


@pytest.mark.parametrize("subject", [*PUBLISHERS, *SUBSCRIBERS])
def test_an_observer_changes_nothing_and_reads_no_message(subject: str) -> None:
    allowed = permissions(OBSERVER, "r")
    reads = {"$JS.API.STREAM.MSG.GET.KV_rl_r_runs", "$JS.API.INFO"}
    hears = {
        "rl.r.metrics.envhub.h1",
        "rl.r.presence.rollout.s1",
        "$KV.rl_r_control.r",
        "$KV.rl_r_runs.r",
    }
    hears |= {"rl.r.weights"}
    hears |= {"$KV.rl_r_members.r.envhub.h1", "$KV.rl_r_members.r.rollout.s1"}
    assert allows(allowed.publish, subject) == (subject in reads)
    assert allows(allowed.subscribe, subject) == (subject in hears)


def test_an_observer_asks_only_what_has_a_reply_in_json() -> None:
    own = f"{inbox_prefix(OBSERVER, 'r', '')}.>"
    asked = {
        subject.removeprefix("$JS.API.")
        for subject in permissions(OBSERVER, "r").publish
        if subject != own
    }
    questions = {subject.rpartition(".")[0] for subject in asked - {"INFO"}}
    assert questions == {"STREAM.INFO", "STREAM.MSG.GET", "CONSUMER.LIST"}


@pytest.mark.parametrize("role", [*ROLES, OBSERVER])
def test_no_subject_of_another_run_and_no_other_inbox(role: str) -> None:
    allowed, others = permissions(role, "r", "host2"), permissions(role, "r2")
    for name in ("publish", "subscribe"):
        mine, theirs = getattr(allowed, name), getattr(others, name)
        # replies, which name no run
        shared = {"$JS.API.INFO", "_R_.>", f"{inbox_prefix(OPERATOR, '', '')}.>"}
        assert set(mine) & set(theirs) == shared & set(mine)
        assert not any(
            allows(mine, one.replace("*", "x").replace(">", "x")) for one in set(theirs) - shared
        )
        assert ">" not in mine
    assert allows(allowed.subscribe, f"{inbox_prefix(role, 'r', 'host2')}.a.1")
    assert not allows(allowed.subscribe, f"{inbox_prefix(role, 'r', '')}.a.1")
    assert not allows(allowed.subscribe, f"{inbox_prefix(role, 'r2', 'host2')}.a.1")


@pytest.mark.parametrize("role", [*ROLES, OBSERVER])
def test_who_replies(role: str) -> None:
    publish = permissions(role, "r").publish
    assert allows(publish, "_R_.k3.x") == (role != OBSERVER)
    assert allows(publish, "_INBOX.operator.all.local.1") == (role == "learner")


@pytest.mark.parametrize("role", [*JOINING, OBSERVER])
def test_a_joining_role_has_no_consumer_of_its_own(role: str) -> None:
    asked = [subject for subject in permissions(role, "r").publish if "CONSUMER" in subject]
    verbs = {subject.split("CONSUMER.")[1].split(".rl_")[0] for subject in asked}
    assert verbs <= {"INFO", "LIST", "MSG.NEXT"}


def test_the_operator_may_do_everything() -> None:
    assert permissions(OPERATOR, "") == Permissions((">",), (">",))


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="role: 'king' is not allowed; one of learner, rollout, envhub, rewardhub"
    ):
        permissions("king", "r")
