"""The doctor and RL_BROKER: a cluster's servers one after the other, and addresses that are none."""

from __future__ import annotations

import socket
import threading

import pytest

from rlearner.doctor.broker_checks import address_findings
from rlearner.doctor.requirements import MachineRequirements


def test_a_cluster_is_asked_server_by_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def answer() -> None:
            talk, _ = server.accept()
            with talk:
                talk.sendall(b'INFO {"version":"2.15.1","jetstream":true}\r\n')

        thread = threading.Thread(target=answer)
        thread.start()
        (found,) = address_findings(
            MachineRequirements(), {"RL_BROKER": f"nats://me:secret@127.0.0.1:1,127.0.0.1:{port}"}
        )
        assert (found.status, found.found) == ("ok", f"nats://127.0.0.1:{port}: nats-server 2.15.1")
        thread.join()
    (found,) = address_findings(
        MachineRequirements(), {"RL_BROKER": f"nats://me:secret@127.0.0.1:{port},127.0.0.1:1"}
    )
    assert (found.status, found.found) == (
        "missing",
        f"127.0.0.1:{port},127.0.0.1:1 of RL_BROKER: Connection refused",
    )
    assert found.remedy.startswith(f"broker serve --port {port} ")


@pytest.mark.parametrize("url", ["nats://h:port", "nats://[h", "h:4222", "nats://"])
def test_an_address_that_is_none(url: str) -> None:
    (found,) = address_findings(MachineRequirements(), {"RL_BROKER": url})
    assert (found.status, found.remedy) == ("missing", "export RL_BROKER=nats://127.0.0.1:4222")
    assert (
        found.found
        == f"RL_BROKER: {url} is not a broker address; expected nats://host:port, or several separated by commas"
    )
