"""What a stranger that reaches the port between the servers of a cluster cannot do: a route may do
everything.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.support.fleet import free_port
from broker.identity.key_folder import KeyFolder
from broker.server.private_server import BrokerServer, ClusterConfig
from broker.system.connections import addresses as own_addresses

OTHERS = [
    one
    for each in own_addresses().values()
    for one in each
    if not one.startswith("127.") and ":" not in one
]
GREETING = {"verbose": False, "pedantic": False, "name": "STRANGER", "cluster": "test"}
SAYS = f"CONNECT {json.dumps(GREETING)}\r\nINFO {json.dumps({'server_id': 'STRANGER', 'cluster': 'test'})}\r\nPING\r\n"


@pytest.fixture(
    params=["127.0.0.1", *OTHERS[:1]],
    ids=["loopback", "another host"][: 1 + len(OTHERS[:1])],
    scope="module",
)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, int, Path]]:
    """Yields the address and port for routes of a server, and its folder of keys."""
    port = free_port(request.param)
    cluster = ClusterConfig("test", "a", port, (f"{request.param}:{port}",))
    store = tmp_path_factory.mktemp("route") / "store"
    with BrokerServer(str(store), bind=request.param, cluster=cluster) as running:
        yield request.param, port, running.keys_path


def answer(server: tuple[str, int, Path], context: ssl.SSLContext | None) -> bytes:
    """Return what the server says to a route of ours."""
    address, port, _ = server
    said = b""
    with (
        contextlib.suppress(OSError),
        socket.create_connection((address, port), timeout=5) as plain,
        context.wrap_socket(plain, server_hostname=address) if context else plain as stream,
    ):
        stream.sendall(SAYS.encode())
        while b"PONG" not in said and (data := stream.recv(65536)):
            said += data
    return said


def context_for(
    server: tuple[str, int, Path], certificate: tuple[Path, Path] | None
) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=KeyFolder(server[2]).authority())
    if certificate:
        context.load_cert_chain(*certificate)
    return context


def test_a_server_with_a_certificate_of_the_folder_of_keys_is_admitted(
    server: tuple[str, int, Path],
) -> None:
    assert b"PONG" in answer(
        server, context_for(server, KeyFolder(server[2]).certificate(server[0]))
    )


@pytest.mark.parametrize(
    "with_what", ["no TLS", "no certificate", "a certificate of another authority"]
)
def test_a_stranger_is_not(with_what: str, server: tuple[str, int, Path], tmp_path: Path) -> None:
    other = KeyFolder(tmp_path / "keys").certificate(server[0])
    context = (
        None
        if with_what == "no TLS"
        else context_for(server, other if "another" in with_what else None)
    )
    assert b"PONG" not in answer(server, context)
