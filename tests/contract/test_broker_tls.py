"""A broker that other hosts reach: its certificate, its clients, and what they refuse."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from waits import LONG_S, until

import broker.identity.certificates as certificates
from broker.errors import BrokerUnreachable, UserError
from broker.identity import tokens
from broker.identity.key_folder import KeyFolder
from broker.identity.login import Login, find_login, keys_of
from broker.jetstream.bus import Bus
from broker.nats import addresses
from broker.nats.client import NO_LOGIN
from broker.nats.connection import NatsLink
from broker.server.private_server import BrokerServer
from broker.system.connections import addresses as own_addresses

OWN = [
    one
    for each in own_addresses().values()
    for one in each
    if not one.startswith("127.") and ":" not in one
]
pytestmark = pytest.mark.skipif(not OWN, reason="this host has no address but loopback")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerServer]:
    with BrokerServer(str(tmp_path_factory.mktemp("tls") / "store"), bind=OWN[0]) as running:
        yield running


async def why_refused(url: str, login: Login | None = None) -> str:
    """Return why a process does not connect."""
    with pytest.raises(BrokerUnreachable) as caught:
        await Bus.connect(url, "demo", name="x", login=login, deadline_s=LONG_S)
    return str(caught.value)


async def test_processes_of_this_user_connect_without_an_option(server: BrokerServer) -> None:
    assert server.url.startswith(f"tls://{OWN[0]}:")
    for url in (server.url, server.url.replace("tls://", "nats://")):
        bus = await Bus.connect(url, "demo", name="x", role="learner", deadline_s=LONG_S)
        assert bus.link.login.role == "learner"
        transport: Any = bus.link._client._transport
        assert transport._io_writer.get_extra_info("ssl_object").version() == "TLSv1.3"
        await bus.close()


async def test_a_disconnect_logs_no_warning_of_asyncio(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with BrokerServer(str(tmp_path / "store"), bind=OWN[0]) as running:
        bus = await Bus.connect(running.url, "demo", name="x", role="learner", deadline_s=LONG_S)
    await until(lambda: not bus.link.connected.is_set())
    await bus.close()
    assert [record for record in caplog.records if record.name == "asyncio"] == []


async def test_a_token_is_enough_elsewhere(
    server: BrokerServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = tokens.make_join_token(keys_of(server.url), server.url, "envhub", "demo", expires_s=60)
    assert made.authority.startswith("-----BEGIN CERTIFICATE-----")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    bus = await Bus.connect(
        made.broker, "demo", name="x", role="envhub", login=made.login, deadline_s=LONG_S
    )
    await bus.close()


async def test_without_the_authority_the_server_is_not_trusted(server: BrokerServer) -> None:
    login = find_login(server.url, "envhub", "demo")
    said = await why_refused(server.url, Login("envhub", "demo", key=login.key))
    assert said.startswith(
        f"this process does not connect to the broker at {server.url}: its certificate is not accepted: "
    )
    assert said.endswith("use a join token of this broker, or name its authority in RL_BROKER_CA")


async def test_another_brokers_authority_does_not_count(
    server: BrokerServer, tmp_path: Path
) -> None:
    login = find_login(server.url, "envhub", "demo")
    other = KeyFolder(tmp_path / "keys")
    other.certificate(OWN[0])
    said = await why_refused(
        server.url, Login("envhub", "demo", key=login.key, authority=other.authority())
    )
    assert "its certificate is not accepted: " in said


async def test_an_old_version_of_tls_is_refused(server: BrokerServer) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    host, port = server.url.removeprefix("tls://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    await reader.readline()
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await writer.start_tls(context)
    writer.close()


@contextlib.asynccontextmanager
async def listening(info: bytes) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A program that pretends to be a NATS server; yields its address and what it receives."""
    received: list[bytes] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"INFO " + info + b"\r\n")
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(4096):
                received.append(data)
                writer.write(b"-ERR 'Unknown Protocol Operation'\r\n")
        writer.close()

    running = await asyncio.start_server(accept, OWN[0], 0)
    async with running:
        yield f"{OWN[0]}:{running.sockets[0].getsockname()[1]}", received


INFO = b'{"server_id":"x","version":"2.15.1","max_payload":9000000,"auth_required":true%s}'


async def test_tls_addresses_insist_on_tls(tmp_path: Path) -> None:
    async with listening(INFO % b"") as (place, received):
        said = await why_refused(f"tls://me:secret@{place}")
    assert said == (
        f"this process does not connect to the broker at {place}: TLS fails: what answers there speaks no TLS"
    )
    assert received
    assert not any(b"secret" in data or b"CONNECT" in data for data in received)


@pytest.mark.parametrize("login", ["", "me:secret@"])
async def test_another_host_without_tls_is_refused(
    login: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with listening(INFO % b"") as (place, received):
        said = await why_refused(f"nats://{login}{place}")
        assert said.endswith(": it uses no TLS; add --insecure only on a network that you trust")
        assert received == []
        monkeypatch.setenv(addresses.INSECURE, "1")
        link = NatsLink(f"nats://{login}{place}", "x")
        with pytest.raises(BrokerUnreachable):
            await link.open(1.0)
        assert any(b"CONNECT" in data for data in received)


async def test_another_host_without_a_login_is_refused(
    server: BrokerServer, tmp_path: Path
) -> None:
    login = Login(authority=find_login(server.url, "envhub", "demo").authority)
    said = await why_refused(server.url, login)
    assert said.endswith(f": {NO_LOGIN}")


def make_certificate(folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Make the certificate of a server as if at another time, or for another address."""
    keys = KeyFolder(folder)
    for name, value in changes.items():
        monkeypatch.setattr(certificates, name, value)
    made, _ = keys.certificate(OWN[0])
    monkeypatch.undo()
    assert made.exists()


@pytest.mark.parametrize(
    ("days", "says"),
    [(-400, "it has expired by the clock"), (30, "it is not yet valid by the clock")],
)
async def test_a_certificate_of_another_time(
    days: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    then = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    keys = KeyFolder(tmp_path / "store.keys")
    keys.certificate(OWN[0])
    (keys.path / "tls" / f"{OWN[0]}.pem").unlink()
    make_certificate(keys.path, monkeypatch, _utc_now=lambda: then, RENEW_DAYS=-10_000)
    monkeypatch.setattr(certificates, "RENEW_DAYS", -10_000)
    with BrokerServer(str(tmp_path / "store"), bind=OWN[0]) as server:
        said = await why_refused(server.url)
    assert says in said
    assert "renew it (restart our broker) or set the clock" in said


async def test_a_start_renews_a_certificate_that_ends_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    then = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=400)
    keys = KeyFolder(tmp_path / "store.keys")
    keys.certificate(OWN[0])
    authority = keys.authority()
    (keys.path / "tls" / f"{OWN[0]}.pem").unlink()
    make_certificate(keys.path, monkeypatch, _utc_now=lambda: then, RENEW_DAYS=-10_000)
    with BrokerServer(str(tmp_path / "store"), bind=OWN[0]) as server:
        bus = await Bus.connect(server.url, "demo", name="x", deadline_s=LONG_S)
        await bus.close()
    assert keys.authority() == authority


def test_keys_of_certificates_are_private(server: BrokerServer) -> None:
    folder = server.keys_path / "tls"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == {
        name: 0o600 for name in ("ca.pem", "ca.key", f"{OWN[0]}.pem", f"{OWN[0]}.key")
    }


def test_a_damaged_authority_is_one_line() -> None:
    with pytest.raises(
        UserError,
        match=r"^the certificate of the broker's authority is damaged; ask for a new join token$",
    ):
        Login(
            authority="-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
        ).tls_context()


@pytest.mark.parametrize("command", ["envhub", "rollout", "rewardhub", "broker", "rlearner"])
def test_a_login_in_a_command_line_is_refused_and_one_in_the_environment_is_not_shown(
    command: str,
) -> None:
    more = {"broker": ["status"], "rlearner": ["invited"]}.get(command, [])
    words = [sys.executable, "-m", f"{command}.cli", *more]
    done = subprocess.run(
        [*words, "--broker", "nats://me:hunter22@h:1"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr == (
        "error: --broker h:1: an address without a login, because other users can see it here; put the address into "
        "RL_BROKER\n"
    )
    env = {**os.environ, "RL_BROKER": "nats://me:hunter22@h:1"}
    shown = subprocess.run(
        [*words, "--help"], capture_output=True, text=True, check=False, timeout=60, env=env
    )
    assert shown.returncode == 0
    assert "hunter22" not in shown.stdout
    assert "h:1" in shown.stdout
