"""Which address of this host reaches another one, and whose it is."""

from __future__ import annotations

import socket

import pytest

from broker.errors import ConfigError
from broker.system.connections import (
    address_of,
    address_towards,
    addresses,
    interface_of,
    is_loopback,
)
from broker.weights.carriers.nccl import nccl_environment
from learner.weights.addresses import weights_address


def test_loopback_is_reached_from_loopback() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert address_of("lo") == "127.0.0.1"
    assert interface_of("192.0.2.1") == ""


def test_every_address_belongs_to_its_interface_and_reaches_itself() -> None:
    found = addresses()
    assert found["lo"][0] == "127.0.0.1"
    for name, known in found.items():
        assert address_of(name) == known[0]
        if "." in known[0]:
            assert address_towards(known[0]) == known[0]


def test_an_unknown_host_is_an_error() -> None:
    with pytest.raises(socket.gaierror):
        address_towards("no-such-host.invalid")


@pytest.mark.parametrize(
    ("host", "expected"),
    [("localhost", True), ("::1", True), ("127.9.9.9", True), ("10.0.0.1", False), ("web", False)],
)
def test_loopback_is_recognized(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_nccl_is_told_the_interface() -> None:
    assert nccl_environment("127.0.0.1") == {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "NCCL_SOCKET_IFNAME": "=lo",
        "NCCL_SOCKET_FAMILY": "AF_INET",
    }


def test_weights_are_where_the_setting_or_the_broker_says(caplog: pytest.LogCaptureFixture) -> None:
    assert weights_address("lo", "nats://192.0.2.1:4222") == "127.0.0.1"
    assert (
        weights_address(None, "nats://user:secret@localhost:4222,nats://192.0.2.1:4222")
        == "127.0.0.1"
    )
    # of other hosts
    assert weights_address(None, "nats://localhost:4222", "10.9.8.7") == "10.9.8.7"
    assert weights_address("lo", "nats://localhost:4222", "10.9.8.7") == "127.0.0.1"
    with pytest.raises(
        ConfigError, match=r"train\.weights_interface: 'eth77' is not allowed; expected .*lo"
    ):
        weights_address("eth77", "nats://localhost:4222")
    assert weights_address(None, "nats://user:secret@no-such-host.invalid:4222") == "127.0.0.1"
    assert "no route to the broker's no-such-host.invalid" in caplog.text
    assert "secret" not in caplog.text
