"""What each account imports and exports follows from the permissions of its role."""

from __future__ import annotations

import itertools
import re

import pytest

from broker.contract.permissions import (
    API,
    JOINING,
    LEARNER,
    OBSERVER,
    OPERATOR,
    inbox_prefix,
    permissions,
)
from broker.identity.accounts import (
    ACCOUNT,
    MAPPED_API,
    RELAY,
    Import,
    account_of,
    accounts_of,
    map_subject,
    unmap_subject,
)
from broker.identity.server_config import (
    CONNECTIONS,
    ServerUser,
    account_names,
    format_accounts,
    nkey_user,
)

EVERY_ROLE = (LEARNER, *JOINING, OBSERVER)
USERS = [(OPERATOR, ""), *((role, run) for run in ("quick", "other") for role in EVERY_ROLE)]
ACCOUNTS = {account.name: account for account in accounts_of(USERS)}


def test_an_account_per_run_and_joining_role() -> None:
    names = {
        f"{ACCOUNT}_{run}_{role}" for run in ("quick", "other") for role in (*JOINING, OBSERVER)
    }
    assert set(ACCOUNTS) == {ACCOUNT, RELAY, *names}
    assert {account.name for account in accounts_of([(OPERATOR, "")])} == {ACCOUNT}


def test_the_joining_roles_of_a_run_get_their_accounts_together() -> None:
    assert [account.name for account in accounts_of([(LEARNER, "quick")])] == [
        ACCOUNT,
        RELAY,
        *(f"{ACCOUNT}_quick_{role}" for role in sorted(JOINING)),
    ]


@pytest.mark.parametrize("role", [*JOINING, OBSERVER])
def test_an_account_imports_exactly_the_services_that_its_role_may_publish_to(role: str) -> None:
    account = ACCOUNTS[account_of(role, "quick")]
    services = {one.local_subject for one in account.imports}
    own = {f"{inbox_prefix(role, 'quick', '')}.>", "_R_.>"}
    assert (
        services == {map_subject(subject) for subject in permissions(role, "quick").publish} - own
    )


@pytest.mark.parametrize("role", [*JOINING, OBSERVER])
def test_an_account_imports_nothing_of_another_run_and_no_consumer(role: str) -> None:
    for one in ACCOUNTS[account_of(role, "quick")].imports:
        assert "other" not in f"{one.exporter}.{one.subject}"
        assert not re.search(
            r"CONSUMER\.(CREATE|DURABLE|DELETE)|STREAM\.(CREATE|UPDATE|PURGE|DELETE)", one.subject
        )


@pytest.mark.parametrize("name", ACCOUNTS)
def test_every_import_has_an_export_and_no_exports_overlap(name: str) -> None:
    account = ACCOUNTS[name]
    for one in account.imports:
        exports = ACCOUNTS[one.exporter].exports
        assert sum(covers(export.subject, one.subject) for export in exports) == 1, one
    for one, other in itertools.combinations(account.exports, 2):
        assert not covers(one.subject, other.subject)
        assert not covers(other.subject, one.subject)


def covers(pattern: str, subject: str) -> bool:
    parts, there = pattern.split("."), subject.split(".")
    return len(parts) == len(there) and all(
        a in ("*", b) for a, b in zip(parts, there, strict=True)
    )


def test_only_pulls_have_many_replies() -> None:
    many = [
        one.subject
        for account in ACCOUNTS.values()
        for one in account.exports
        if one.has_many_replies
    ]
    assert many == [f"{API}.CONSUMER.MSG.NEXT.*.*"]


def test_news_cross_from_the_account_of_jetstream_through_the_relay() -> None:
    hub = f"{ACCOUNT}_quick_envhub"
    heard = {one.subject for one in ACCOUNTS[RELAY].imports if one.exporter == hub}
    assert "rl.quick.presence.rollout.*" in heard
    assert "$KV.rl_quick_control.quick" in heard
    assert "rl.quick.presence.envhub.*" not in heard  # it would hear its own twice
    assert Import(ACCOUNT, "rl.quick.presence.envhub.*") in ACCOUNTS[hub].imports
    relayed = {one.subject for one in ACCOUNTS[ACCOUNT].imports}
    assert {"rl.*.presence.*.*", "$KV.rl_quick_control.quick"} <= relayed
    assert {one.exporter for one in ACCOUNTS[ACCOUNT].imports} == {RELAY}


def test_the_relay_passes_on_what_roles_hear_and_nothing_twice() -> None:
    patterns = [one.subject for one in ACCOUNTS[ACCOUNT].imports]
    for one in ACCOUNTS[RELAY].imports:
        assert sum(covers(pattern, one.subject) for pattern in patterns) == 1, one
    for one, other in itertools.combinations(patterns, 2):
        assert not covers(one, other), (one, other)
        assert not covers(other, one), (one, other)
    stored = ("samples", "episodes.x.7", "parts.train.7.x.0", "tickets.lake", "dead.tickets")
    crossing = [f"rl.quick.{subject}" for subject in stored] + ["$KV.rl_quick_attempts.quick.t.9"]
    assert not [
        subject for subject in crossing if any(covers(pattern, subject) for pattern in patterns)
    ]


def test_the_relay_has_no_users_and_gives_each_run_its_own_news() -> None:
    for imported in ACCOUNTS[RELAY].imports:
        run = imported.exporter.split("_")[1]
        assert imported.subject.startswith((f"rl.{run}.", f"$KV.rl_{run}_")), imported
    assert RELAY not in {account_of(role, run) for role, run in USERS}


def test_a_reload_compares_few_imports() -> None:
    """A server compares each import from an account with every import of that account: 2.5 million
    pairs of 50 runs without the relay.
    """
    users = [(role, f"run-{number}") for number in range(50) for role in (LEARNER, *JOINING)]
    accounts = {account.name: account for account in accounts_of(users)}
    pairs = sum(
        len(accounts[imported.exporter].imports) // 2  # half of them are read later
        for account in accounts.values()
        for imported in account.imports
    )
    assert pairs < 700_000


@pytest.mark.parametrize("name", ACCOUNTS)
def test_no_subject_crosses_both_ways(name: str) -> None:
    """A server refuses such a cycle, and with it the whole configuration."""
    for sent in ACCOUNTS[name].imports:
        for back in ACCOUNTS[sent.exporter].imports:
            is_overlapping = covers(sent.subject, back.subject) or covers(
                back.subject, sent.subject
            )
            assert back.exporter != name or not is_overlapping


def user_of(identity: tuple[str, str]) -> ServerUser:
    return nkey_user("U" * 56, *identity)


def test_names_in_the_configuration_and_of_refusals() -> None:
    text = format_accounts(map(user_of, USERS))
    assert account_names(text) == set(ACCOUNTS)
    assert (
        text.count(f'mappings = {{ "{API}.>": "{MAPPED_API}.>" }}') == len(ACCOUNTS) - 1
    )  # all but that of JetStream
    # two keys of hubs of the run `quick`, one of each other joining role
    more = format_accounts([*map(user_of, USERS), nkey_user("V" * 56, "envhub", "quick", "host-2")])
    limits = re.findall(r"limits { max_connections: (\d+) }", more)
    assert sorted(map(int, limits)) == [*[CONNECTIONS] * 7, 2 * CONNECTIONS]
    assert "allow_responses" not in text
    for subject in ("$JS.API.STREAM.INFO.x", "rl.quick.samples", "$JS.ACK.x.>"):
        assert unmap_subject(map_subject(subject)) == subject
    # nats-py lowers what servers say
    assert unmap_subject("rljs.stream.info.x") == "$JS.API.stream.info.x"
