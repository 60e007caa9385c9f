"""Three brokers on an address that other hosts reach: TLS for clients and between the servers, keys
of one folder.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from broker_cluster import ClusterNodes

from broker.contract.streams import TICKETS
from broker.identity import tokens
from broker.identity.key_folder import KeyFolder
from broker.identity.login import keys_of
from broker.jetstream.bus import Bus
from broker.server.private_server import BrokerServer
from broker.server.server_supervisor import ServerSupervisor
from broker.system.connections import addresses as own_addresses

OWN = [
    one
    for each in own_addresses().values()
    for one in each
    if not one.startswith("127.") and ":" not in one
]


@pytest.mark.skipif(not OWN, reason="this host has no address but loopback")
async def test_a_run_has_three_replicas(tmp_path: Path) -> None:
    nodes = ClusterNodes(tmp_path / "cluster", bind=OWN[0])
    try:
        await asyncio.to_thread(nodes.start_all)
        assert nodes.url.startswith(f"tls://{OWN[0]}:")
        bus = await Bus.connect(nodes.url, "team", name="learner", role="learner", deadline_s=60)
        await bus.ensure_streams()
        info = await bus.info(TICKETS)
        assert info["config"]["num_replicas"] == 3
        await nodes.settled(bus)
        made = tokens.make_join_token(keys_of(nodes.url), nodes.url, "envhub", "team", expires_s=60)
        hub = await Bus.connect(
            nodes.url, "team", name="hub", role="envhub", login=made.login, deadline_s=60
        )
        await hub.ensure_streams()
        nodes.kill(0)
        async with asyncio.timeout(60):
            await bus.ensure_streams()
            await hub.ensure_streams()
        await hub.close()
        await bus.close()
    finally:
        await asyncio.to_thread(nodes.stop)


def reloads_of(server: BrokerServer) -> int:
    return server.log_path.read_text().count("Reloaded server configuration")


async def test_a_server_follows_what_a_process_of_another_host_changed(tmp_path: Path) -> None:
    with BrokerServer(str(tmp_path / "store")) as server:
        supervisor, keys = ServerSupervisor(server), KeyFolder(server.keys_path)
        assert supervisor.look() == []
        (note,) = (server.keys_path / "servers").glob("[0-9]*")
        identity = note.read_text()
        # which this process must not signal
        note.write_text(f"another boot/pid:[1]/{server.pid}/1")
        reloads = reloads_of(server)
        made = tokens.make_join_token(keys, server.url, "envhub", "demo", expires_s=60)
        await asyncio.sleep(0.3)
        assert reloads_of(server) == reloads
        note.write_text(identity)
        times = (server.keys_path / "authorization.conf").stat().st_mtime_ns - 1_000_000
        os.utime(note, ns=(times, times))
        assert supervisor.look() == []
        bus = await Bus.connect(
            server.url, "demo", name="x", role="envhub", login=made.login, deadline_s=20
        )
        await bus.close()
        assert note.stat().st_mtime_ns > times
