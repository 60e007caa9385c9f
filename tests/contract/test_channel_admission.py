"""Who may send requests to a server over the network, and that a client talks to the server that it
means.
"""

from __future__ import annotations

import asyncio
import time

import pytest
import zmq
from channel_kit import HubClient, ask, hub_client, network_server, raw_dealer
from waits import LONG_S

from broker.channel import hub_admission
from broker.channel.bundle import pack
from broker.channel.zmq_address import ServerAddress, this_host
from broker.contract import codec
from broker.errors import ConfigError, RequestFailed
from broker.jetstream.bus import Bus

SOON_S = 0.5


async def test_a_hub_that_is_present_is_admitted_by_its_key(bus: Bus) -> None:
    async with network_server(bus) as server, hub_client(bus) as client:
        began = time.monotonic()
        reply = await client.generate(server.address, ask(tokens=5), timeout_s=LONG_S)
        assert time.monotonic() - began < LONG_S / 2
        assert reply.token_ids.array().tolist() == [0, 1, 2, 3, 4]
        assert server.server._network is not None
        assert server.server._network.admission.admits(client.key)


async def test_a_hub_without_presence_is_not_admitted(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_admission, "WAIT_S", SOON_S)
    async with network_server(bus) as server, hub_client(bus, present=False) as client:
        with pytest.raises(RequestFailed, match="does not admit this process: no presence"):
            await client.generate(server.address, ask(), timeout_s=LONG_S)
        assert server.asked == []
        await client.start()  # now it is
        try:
            assert (
                await client.generate(server.address, ask("again"), timeout_s=LONG_S)
            ).finish_reason == "stop"
        finally:
            await client.leave()


async def test_a_hub_of_another_run_is_not_admitted(
    bus: Bus, broker_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_admission, "WAIT_S", SOON_S)
    other = await Bus.connect(broker_url, f"{bus.run}-other", name="other", deadline_s=60)
    await other.ensure_streams()
    async with network_server(bus) as server, hub_client(other) as client:
        with pytest.raises(RequestFailed, match="does not admit"):
            await client.generate(server.address, ask(), timeout_s=LONG_S)
        assert server.asked == []
    await other.delete_streams()
    await other.close()


async def test_a_hub_that_has_left_is_cut_off(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_admission, "WAIT_S", SOON_S)
    monkeypatch.setattr(hub_admission, "SILENT_S", 2.0)
    async with network_server(bus) as server, hub_client(bus, present=False) as client:
        await client.start()
        await client.generate(server.address, ask("before"), timeout_s=LONG_S)
        await client.leave()
        async with asyncio.timeout(LONG_S):
            while server.server._network.admission.admits(client.key):  # type: ignore[union-attr]  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        with pytest.raises(RequestFailed):
            await client.generate(server.address, ask("after"), timeout_s=5)
        assert server.asked == ["before"]


async def test_a_server_with_another_key_gets_nothing(bus: Bus) -> None:
    """As a man in the middle who listens at the server's address."""
    async with (
        network_server(bus, "real") as real,
        network_server(bus, "wrong") as wrong,
        hub_client(bus) as client,
    ):
        address = str(ServerAddress(wrong.tcp, real.key, this_host()))
        with pytest.raises(RequestFailed, match=r"not this server|connection broke|no answer"):
            await client.generate(address, ask(), timeout_s=8)
        assert wrong.asked == real.asked == []
        assert (await client.generate(real.address, ask("r2"), timeout_s=LONG_S)).server == "s1"
        assert real.asked == ["r2"]


async def test_plain_zeromq_is_refused(bus: Bus) -> None:
    async with (
        network_server(bus) as server,
        raw_dealer(server.tcp) as plain,
        hub_client(bus) as client,
    ):
        await plain_send(plain)
        assert (
            await client.generate(server.address, ask("good"), timeout_s=LONG_S)
        ).finish_reason == "stop"
        assert not plain.poll(200)
        assert server.asked == ["good"]


async def plain_send(socket: zmq.Socket[bytes]) -> None:
    await asyncio.to_thread(socket.send, pack([("1", codec.encode(ask("plain")))]))


async def test_processes_of_one_host_and_user_use_a_local_socket(bus: Bus) -> None:
    async with network_server(bus) as server:
        assert ServerAddress.parse(server.server.address).endpoint()[0].startswith("ipc:///")
        client = HubClient(bus)  # not present
        try:
            reply = await client.generate(server.server.address, ask(), timeout_s=LONG_S)
            assert reply.finish_reason == "stop"
            assert len(server.server._network.limits) == 0  # type: ignore[union-attr]
        finally:
            await client.close()


async def test_a_server_on_a_port_in_use_says_so(bus: Bus) -> None:
    async with network_server(bus) as server:
        port = server.tcp.rpartition(":")[2]
        with pytest.raises(
            ConfigError, match=rf"--bind: '127.0.0.1:{port}' is not allowed; another program uses"
        ):
            async with network_server(bus, "s2", f"127.0.0.1:{port}"):
                pass
    with pytest.raises(
        ConfigError, match=r"--bind: '192\.0\.2\.1' is not allowed; expected .* 127\.0\.0\.1"
    ):
        async with network_server(bus, "s3", "192.0.2.1"):
            pass
