"""Logins for a user's own nats-server, each against a real server with that authentication."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import nats
import pytest
from jwt_accounts import JwtAccounts
from own_authority import OwnAuthority
from own_server import own_server

from broker.contract import wire
from broker.contract.streams import RUNS, TICKETS
from broker.identity.cluster_login import CA, CERT, CERT_KEY, CREDS, NKEY, PASSWORD, USER
from broker.identity.key_folder import KeyFolder, as_server_user
from broker.identity.keys import Key
from broker.identity.login import KEYS, client_options, find_login
from broker.identity.server_config import (
    ServerUser,
    certificate_user,
    format_accounts,
    password_user,
)
from broker.jetstream.bus import Bus
from broker.settings.runspec import publish_runspec

RUN = "quick"
ROLES = ("learner", "envhub", "operator")
VARIABLES = (NKEY, CREDS, USER, PASSWORD, CERT, CERT_KEY, CA, KEYS)


@dataclass
class Place:
    """A server of one kind of authentication, and the environment of each role."""

    url: str
    logins: dict[str, dict[str, str]]
    folder: Path
    jwt: JwtAccounts = field(default_factory=lambda: JwtAccounts(RUN))
    authority: OwnAuthority | None = None


def users(make: object) -> list[ServerUser]:
    assert callable(make)
    return [make(role, "" if role == "operator" else RUN) for role in ROLES]


def tls_lines(authority: OwnAuthority, *, days: int = 10, more: str = "verify: true") -> str:
    certificate, key = authority.certificate("server", days=days)
    return f'tls {{ cert_file: "{certificate}", key_file: "{key}", ca_file: "{authority.file}", {more} }}'


def private(file: Path, text: str) -> str:
    file.write_text(text)
    file.chmod(0o600)
    return str(file)


@pytest.fixture(scope="module")
def with_nkeys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("nkeys")
    keys = KeyFolder(folder / "keys")
    _ = keys.operator(), keys.role("learner", RUN), keys.role("envhub", RUN), keys.owner(RUN)
    files = {"operator": keys.path / "operator.key"} | {
        one: keys.path / RUN / f"{one}.key" for one in ROLES[:2]
    }
    with own_server(
        folder / "server", include=format_accounts(map(as_server_user, keys.users()))
    ) as url:
        yield Place(url, {role: {NKEY: str(file)} for role, file in files.items()}, folder)


@pytest.fixture(scope="module")
def with_passwords(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("passwords")
    env = {f"RLEARNER_{RUN}_{role}_PASSWORD".upper(): f"hunter-{role}" for role in ROLES}
    env |= {"RLEARNER_OPERATOR_PASSWORD": "hunter-operator"}
    names = {role: role if role == "operator" else f"{RUN}.{role}" for role in ROLES}
    logins = {
        role: {USER: name, PASSWORD: private(folder / role, f"hunter-{role}\n")}
        for role, name in names.items()
    }
    with own_server(
        folder / "server", include=format_accounts(users(password_user)), env=env
    ) as url:
        yield Place(url, logins, folder)


@pytest.fixture(scope="module")
def with_jwts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder, made = tmp_path_factory.mktemp("jwt"), JwtAccounts(RUN)
    logins = {
        role: {CREDS: str(made.credentials(folder / f"{role}.creds", role))} for role in ROLES
    }
    with own_server(folder / "server", include=made.configuration()) as url:
        yield Place(url, logins, folder, made)


@pytest.fixture(scope="module")
def with_certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("certificates")
    authority = OwnAuthority(folder / "pki")
    logins = {}
    for role in ROLES:
        certificate, key = authority.certificate(role if role == "operator" else f"{RUN}.{role}")
        logins[role] = {CERT: str(certificate), CERT_KEY: str(key), CA: str(authority.file)}
    more = tls_lines(authority, more="verify_and_map: true")
    with own_server(
        folder / "server", include=format_accounts(users(certificate_user)), more=more
    ) as url:
        yield Place(url.replace("nats://", "tls://"), logins, folder, authority=authority)


KINDS = ("with_nkeys", "with_passwords", "with_jwts", "with_certificates")


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest) -> Place:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Place)
    return found


def environment(place: Place, role: str, **changed: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    return clean | {"RL_BROKER": place.url} | place.logins[role] | changed


def status(env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "broker.cli", "status", "--connect-deadline", "20"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=env)


def why_refused(env: dict[str, str]) -> str:
    """Return the only line that a command prints that cannot log in."""
    done = status(env)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    return line


async def connect(monkeypatch: pytest.MonkeyPatch, place: Place, role: str) -> Bus:
    with monkeypatch.context() as changed:
        for name, value in place.logins[role].items():
            changed.setenv(name, value)
        login = find_login(place.url, role, RUN)
    return await Bus.connect(place.url, RUN, name=role, role=role, login=login, deadline_s=20)


async def test_a_run_is_found_by_a_hub_of_its_own_login(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = await connect(monkeypatch, place, "learner")
    await learner.ensure_streams()
    await learner.ensure_consumers(TICKETS, ["lake"])
    await publish_runspec(
        learner,
        wire.RunSpec(run=RUN, wire_version=wire.WIRE_VERSION, epoch=1, config={}, model_path=""),
    )
    hub = await connect(monkeypatch, place, "envhub")
    await hub.ensure_streams()
    assert hub.link.inbox.startswith(f"_INBOX.envhub.{RUN}.local.")
    assert (await hub.key_value(RUNS).get(RUN)) is not None
    done = await asyncio.to_thread(status, environment(place, "operator"))
    assert done.returncode == 0, done.stderr
    assert f"\n{RUN}: running; no processes\n" in done.stdout
    await hub.close()
    await learner.close()


async def test_a_plain_client_logs_in_as_the_operator(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in place.logins["operator"].items():
        monkeypatch.setenv(name, value)
    client = await nats.connect(place.url, allow_reconnect=False, **client_options(place.url))
    heard = await client.subscribe("anything")
    await client.publish("anything", b"x")
    assert (await heard.next_msg(timeout=10)).data == b"x"
    await client.close()


def test_a_login_of_another_role_is_one_line(place: Place) -> None:
    assert why_refused(environment(place, "envhub")) == (
        f"error: the login for {place.url} may not receive replies as the operator, who sees all runs; name its run "
        "with --run, or give it the permissions that `broker permissions` prints for that role"
    )


def test_a_key_that_the_servers_do_not_know(with_nkeys: Place, tmp_path: Path) -> None:
    key = Key.generate()
    said = why_refused(
        environment(with_nkeys, "operator", **{NKEY: private(tmp_path / "key", key.seed)})
    )
    assert said == (
        f"error: the servers at {with_nkeys.url} refuse the key {key.public} of {NKEY}: they do not know it; "
        "include the output of `broker permissions` in the configuration and reload the servers"
    )


def test_a_folder_of_keys_is_a_login_for_every_role(with_nkeys: Place) -> None:
    keys = {NKEY: "", KEYS: str(with_nkeys.folder / "keys")}
    assert status(environment(with_nkeys, "operator", **keys)).returncode == 0


def test_a_wrong_password(with_passwords: Place, tmp_path: Path) -> None:
    wrong = {PASSWORD: private(tmp_path / "wrong", "hunter3\n")}
    said = why_refused(environment(with_passwords, "operator", **wrong))
    assert said == (
        f"error: the servers at {with_passwords.url} refuse the user 'operator' of {USER}: unknown, or not with this "
        f"password; check {PASSWORD}"
    )


def test_a_login_in_the_address(with_passwords: Place) -> None:
    host = with_passwords.url.removeprefix("nats://")
    plain = {USER: "", PASSWORD: ""}
    env = environment(with_passwords, "operator", **plain)
    assert status(env | {"RL_BROKER": f"nats://operator:hunter-operator@{host}"}).returncode == 0
    said = why_refused(env | {"RL_BROKER": f"nats://operator:hunter3@{host}"})
    assert (
        "refuse the user 'operator' of RL_BROKER: unknown, or not with this password; check RL_BROKER"
        in said
    )
    assert "hunter3" not in said


def test_a_jwt_that_has_expired(with_jwts: Place, tmp_path: Path) -> None:
    file = with_jwts.jwt.credentials(
        tmp_path / "old.creds", "operator", expires_at=time.time() - 60
    )
    said = why_refused(environment(with_jwts, "operator", **{CREDS: str(file)}))
    assert said.startswith(
        f"error: the servers at {with_jwts.url} refuse the JWT of {CREDS}, which expired at 20"
    )
    assert said.endswith(" UTC; write a new file (nsc generate creds)")


def test_a_jwt_of_another_operator(with_jwts: Place, tmp_path: Path) -> None:
    file = JwtAccounts(RUN).credentials(tmp_path / "other.creds", "operator")
    said = why_refused(environment(with_jwts, "operator", **{CREDS: str(file)}))
    assert said.endswith(
        f"refuse the JWT of {CREDS}: its user was revoked, or its account is of another operator"
    )


async def test_a_renewed_jwt_is_read_at_the_next_connection(
    with_jwts: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = with_jwts.jwt.credentials(
        tmp_path / "short.creds", "learner", expires_at=time.time() + 3
    )
    monkeypatch.setenv(CREDS, str(file))
    bus = await Bus.connect(with_jwts.url, RUN, name="short", role="learner", deadline_s=20)
    with_jwts.jwt.credentials(file, "learner")
    lost = asyncio.Event()
    bus.link.on_disconnect.add(lost.set)
    async with asyncio.timeout(30):
        await lost.wait()
        await bus.ensure_streams()
    assert not bus.link.refused.done()
    await bus.close()


def test_a_jwt_longer_than_the_server_takes(with_jwts: Place, tmp_path: Path) -> None:
    file = with_jwts.jwt.credentials(tmp_path / "long.creds", "learner", own_permissions=True)
    said = why_refused(environment(with_jwts, "operator", **{CREDS: str(file)}))
    assert re.search(
        rf" refuse the JWT of {CREDS}, whose [0-9]+ characters may exceed their max_control_line; ",
        said,
    )
    assert said.endswith(
        "; give the permissions to a signing key of the account, or raise that limit"
    )


async def test_a_file_that_is_gone_does_not_end_a_process_that_works(
    with_nkeys: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    file, learner = (
        tmp_path / "learner.key",
        KeyFolder(with_nkeys.folder / "keys").role("learner", RUN),
    )
    private(file, learner.seed)
    monkeypatch.setenv(NKEY, str(file))
    bus = await Bus.connect(with_nkeys.url, RUN, name="learner", role="learner", deadline_s=20)
    file.unlink()
    await bus.link._abandon()
    async with asyncio.timeout(20):
        await bus.link.connected.wait()
        await bus.ensure_streams()
    assert (
        f"{NKEY}: cannot read {file}: No such file or directory; connecting with the login read before"
        in caplog.text
    )
    await bus.close()


# --------------------------------------------------------------------------------------------------
# mutual TLS


def test_no_client_certificate(with_certificates: Place) -> None:
    said = why_refused(environment(with_certificates, "operator", **{CERT: "", CERT_KEY: ""}))
    assert said == (
        f"error: this process does not connect to the broker at {with_certificates.url}: it requires a client "
        f"certificate; set {CERT} and {CERT_KEY}"
    )


def test_an_expired_client_certificate(with_certificates: Place) -> None:
    assert with_certificates.authority is not None
    certificate, key = with_certificates.authority.certificate("operator", days=-1)
    said = why_refused(
        environment(with_certificates, "operator", **{CERT: str(certificate), CERT_KEY: str(key)})
    )
    start = f"error: the servers at {with_certificates.url} refuse the certificate of {CERT}, which expired at 20"
    assert said.startswith(start)
    assert said.endswith(" UTC; renew it")


@pytest.mark.parametrize("name", ["operator", "stranger"])
def test_a_client_certificate_of_another_authority_or_of_no_user(
    name: str, with_certificates: Place, tmp_path: Path
) -> None:
    assert with_certificates.authority is not None
    authority = (
        OwnAuthority(tmp_path / "other") if name == "operator" else with_certificates.authority
    )
    certificate, key = authority.certificate(name)
    said = why_refused(
        environment(with_certificates, "operator", **{CERT: str(certificate), CERT_KEY: str(key)})
    )
    assert said == (
        f"error: the servers at {with_certificates.url} refuse the certificate of {CERT}: it is of an authority that "
        "they do not know, or no user has its name; see `broker permissions --login certificate`"
    )


def test_servers_of_an_unknown_authority(with_certificates: Place) -> None:
    said = why_refused(environment(with_certificates, "operator", **{CA: ""}))
    assert "its certificate is not accepted: " in said
    assert said.endswith(f"; use a join token of this broker, or name its authority in {CA}")


def test_an_expired_server(tmp_path: Path, with_certificates: Place) -> None:
    authority = OwnAuthority(tmp_path / "pki")
    with own_server(tmp_path / "server", more=tls_lines(authority, days=-1, more="")) as url:
        said = why_refused(
            environment(with_certificates, "operator", RL_BROKER=url, **{CA: str(authority.file)})
        )
    assert "its certificate is not accepted: it has expired by the clock of this host" in said
