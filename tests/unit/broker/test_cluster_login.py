"""Which login the environment names for a user's own cluster, and which mistakes are refused in one
line.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from broker.contract.permissions import OPERATOR
from broker.errors import UserError, WireError
from broker.identity import tokens
from broker.identity.cluster_login import (
    CA,
    CERT,
    CERT_KEY,
    CREDS,
    NKEY,
    PASSWORD,
    USER,
    ClusterLogin,
    from_environment,
)
from broker.identity.key_folder import KeyFolder
from broker.identity.keys import Key
from broker.identity.login import KEYS, find_login, keys_of
from broker.nats.addresses import without_logins

URL = "nats://127.0.0.1:9"
KEY = Key.generate()


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name, text in {
        "key": KEY.seed,
        "no-key": "hello",
        "password": "hunter2",
        "empty": "\n",
        "creds": "-----BEGIN NATS USER JWT-----\na.e30.b\n------END NATS USER JWT------\n"
        f"-----BEGIN USER NKEY SEED-----\n{KEY.seed}\n------END USER NKEY SEED------\n",
        "pem": "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
    }.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    return tmp_path


def name(monkeypatch: pytest.MonkeyPatch, files: Path, **variables: str) -> None:
    for variable, value in variables.items():
        monkeypatch.setenv(variable, str(files / value) if variable != USER else value)


def test_nothing_is_named() -> None:
    assert from_environment(URL) is None
    assert find_login(URL, "envhub", "quick").role == ""


def test_a_key_has_the_role_of_its_process(monkeypatch: pytest.MonkeyPatch, files: Path) -> None:
    name(monkeypatch, files, **{NKEY: "key"})
    login = find_login(URL, "envhub", "quick")
    assert (login.key, login.role, login.inbox, login.manages) == (
        KEY,
        "envhub",
        "_INBOX.envhub.quick.local",
        False,
    )
    assert find_login(URL, "envhub", "").inbox == "_INBOX.operator.all.local"


def test_a_user_of_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    login = find_login("tls://me:hunter2@h:1,tls://me:hunter2@i:1", "learner", "quick")
    assert login.cluster is not None
    assert login.cluster.user == "me"
    assert (login.role, login.key) == ("learner", None)
    assert "hunter2" not in repr(login)


def test_a_token_next_to_another_login_signs_only(
    monkeypatch: pytest.MonkeyPatch, files: Path
) -> None:
    keys = KeyFolder(files / "folder")
    made = tokens.make_join_token(keys, URL, "envhub", "quick", expires_s=60)
    alone = made.login
    assert (alone.key, alone.inbox) == (Key(made.seed), f"_INBOX.envhub.quick.{made.name}")
    name(monkeypatch, files, **{NKEY: "key"})
    login = made.login
    assert (login.key, login.inbox, login.owner) == (
        KEY,
        "_INBOX.envhub.quick.local",
        keys.owner("quick").public,
    )
    for one in (alone, login):
        alone.check_voucher("quick", "envhub", b"here", one.vouch("quick", b"here"))
    with pytest.raises(WireError):
        alone.check_voucher("quick", "rollout", b"here", login.vouch("quick", b"here"))


@pytest.mark.parametrize(
    ("url", "shared"),
    [
        ("nats://me:hunter2@h:1", "nats://h:1"),
        ("tls://me:hunter2@h:1,tls://me:hunter2@i:2,me:hunter2@j:3", "tls://h:1,tls://i:2,j:3"),
        ("tls://secret@[fd00::1]:1,i:2", "tls://[fd00::1]:1,i:2"),
        ("nats://h:1,i:2", "nats://h:1,i:2"),
    ],
)
def test_an_address_for_others_has_no_login(url: str, shared: str) -> None:
    assert without_logins(url) == shared


def test_secrets_are_not_shown(monkeypatch: pytest.MonkeyPatch, files: Path) -> None:
    name(monkeypatch, files, **{USER: "me", PASSWORD: "password"})
    login = find_login(URL, "learner", "quick")
    assert login.cluster is not None
    assert login.cluster.password == "hunter2"
    assert "hunter2" not in repr(login) + repr(login.cluster)


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({NKEY: "missing"}, "RL_BROKER_NKEY: cannot read {files}/missing: No such file or directory"),
        ({NKEY: "."}, "RL_BROKER_NKEY: cannot read {files}: Is a directory"),
        ({NKEY: "no-key"}, "RL_BROKER_NKEY: {files}/no-key holds no key; expected the seed"),
        ({CREDS: "key"}, "RL_BROKER_CREDS: {files}/key is not a credentials file; expected a user's JWT and seed"),
        ({CREDS: "creds"}, "RL_BROKER_CREDS: the seed in {files}/creds is not that of its JWT; write the file again"),
        ({NKEY: "key", CREDS: "creds"}, "RL_BROKER_NKEY and RL_BROKER_CREDS each name a login for the broker; set"),
        ({USER: "me"}, "RL_BROKER_USER and RL_BROKER_PASSWORD_FILE go together; set both or neither"),
        ({PASSWORD: "password"}, "RL_BROKER_USER and RL_BROKER_PASSWORD_FILE go together; set both or neither"),
        ({USER: "me", PASSWORD: "empty"}, "RL_BROKER_PASSWORD_FILE: {files}/empty is empty; expected"),
        ({CERT: "pem"}, "RL_BROKER_CERT and RL_BROKER_KEY go together; set both or neither"),
        ({CERT_KEY: "key"}, "RL_BROKER_CERT and RL_BROKER_KEY go together; set both or neither"),
        ({KEYS: "missing"}, "there is no folder of keys {files}/missing; make it with `broker permissions --keys"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(
    variables: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch, files: Path
) -> None:
    name(monkeypatch, files, **variables)
    with pytest.raises(UserError) as caught:
        find_login(URL, "learner", "quick")
    assert str(caught.value).startswith(says.format(files=files))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        (
            {CA: "missing"},
            "RL_BROKER_CA: cannot use {files}/missing (No such file or directory); expected",
        ),
        ({CA: "pem"}, "RL_BROKER_CA: cannot use {files}/pem ("),
        (
            {CERT: "pem", CERT_KEY: "key"},
            "RL_BROKER_CERT, RL_BROKER_KEY: cannot use {files}/pem and {files}/key (",
        ),
        (
            {CERT: "pem", CERT_KEY: "missing"},
            "RL_BROKER_KEY: cannot read {files}/missing: No such file or directory",
        ),
    ],
)
def test_unusable_certificates_are_one_line(
    variables: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch, files: Path
) -> None:
    name(monkeypatch, files, **variables)
    with pytest.raises(UserError) as caught:
        find_login(URL, "learner", "quick").tls_context()
    assert str(caught.value).startswith(says.format(files=files))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o620, 0o604])
@pytest.mark.parametrize(
    "variables",
    [
        {NKEY: "key"},
        {CREDS: "creds"},
        {USER: "me", PASSWORD: "password"},
        {CERT: "pem", CERT_KEY: "key"},
    ],
)
def test_files_that_others_can_read_are_refused(
    variables: dict[str, str], mode: int, monkeypatch: pytest.MonkeyPatch, files: Path
) -> None:
    name(monkeypatch, files, **variables)
    variable = list(variables)[-1]
    secret = files / variables[variable]
    secret.chmod(mode)
    os.chown(secret, 1000, 1000)
    with pytest.raises(UserError) as caught:
        find_login(URL, "learner", "quick").tls_context()
    assert str(caught.value) == f"{variable}: other users can read {secret}; run chmod 600 {secret}"


def test_a_group_may_read_a_secret_of_root(monkeypatch: pytest.MonkeyPatch, files: Path) -> None:
    name(monkeypatch, files, **{NKEY: "key"})
    (files / "key").chmod(0o640)
    assert find_login(URL, "learner", "quick").key == KEY


# -------------------------------------------------------------------------------------------------
# a folder of keys


def test_a_folder_of_keys_signs_and_makes_no_new_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = KeyFolder(tmp_path / "keys")
    key, owner, operator = made.role("learner", "quick"), made.owner("quick"), made.operator()
    monkeypatch.setenv(KEYS, str(made.path))
    learner = find_login(URL, "learner", "quick")
    assert (learner.key, learner.role) == (key, "learner")
    assert find_login(URL, OPERATOR, "quick").key == operator
    header = learner.sign("quick", "s", b"x")
    assert learner.stamp("quick", "s", header, b"x") > 0
    assert keys_of(URL).owner("quick") == owner
    for role, run in (("envhub", "quick"), ("learner", "other")):
        with pytest.raises(UserError) as caught:
            find_login(URL, role, run)
        file = made.path / run / f"{role}.key"
        assert str(caught.value) == (
            f"{file} is missing; make it with `broker permissions --run {run} --keys {made.path}`"
        )
        assert not file.exists()


def test_another_login_signs_with_the_folder_of_keys(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = KeyFolder(tmp_path / "keys")
    made.owner("quick")
    monkeypatch.setenv(KEYS, str(made.path))
    login = find_login("nats://me:hunter2@127.0.0.1:9", "learner", "quick")
    assert login.key is None
    assert login.stamp("quick", "s", login.sign("quick", "s", b"x"), b"x") > 0


@pytest.mark.parametrize(
    ("certificate", "refusal"),
    [
        ("", "a login without a client certificate; set RL_BROKER_CERT and RL_BROKER_KEY"),
        ("missing", ", whose file {} cannot be read any more"),
        ("pem", ", whose file {} cannot be read any more"),
    ],
)
def test_a_refused_certificate_that_cannot_be_read(
    files: Path, certificate: str, refusal: str
) -> None:
    file = str(files / certificate) if certificate else ""
    login = ClusterLogin(NKEY, key=KEY, certificate=file)
    reason = login.why_refused(by_certificate=True)
    assert reason == (f"the certificate of {CERT}" if certificate else "") + refusal.format(file)
