"""One token cannot fill the broker's memory: what it may store there is bounded in size, in number
and altogether, and so are its connections.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import nats
import pytest
from broker_strangers import Stranger, stranger

from broker.contract.permissions import JOINING
from broker.contract.streams import ATTEMPTS, DEVICES, MEMBERS, STREAMS, Stream
from broker.identity import server_config, tokens
from broker.identity.login import keys_of
from broker.jetstream.bus import Bus
from broker.server import private_server
from broker.server.private_server import BrokerServer

WRITTEN = [
    ("envhub", ATTEMPTS, "t.x{}"),
    ("rollout", DEVICES, "x{}"),
    *((role, MEMBERS, f"{role}.x{{}}") for role in ("rollout", "envhub", "rewardhub")),
]


async def put(one: Stranger, bus: Bus, stream: Stream, name: str, num_bytes: int) -> bool:
    """Return whether the broker stores bytes under a name."""
    place = f"{stream.key_prefix(bus.run)}{bus.run}.{name}"
    answer = await one.client.request(place, bytes(num_bytes), timeout=30)
    return b'"error"' not in answer.data


@pytest.mark.parametrize(
    ("role", "stream", "name"), WRITTEN, ids=lambda value: getattr(value, "name", value)
)
async def test_a_value_in_memory_is_small(
    bus: Bus, broker_url: str, role: str, stream: Stream, name: str
) -> None:
    async with stranger(broker_url, role, bus.run) as one:
        assert await put(one, bus, stream, name.format(0), 512)
        assert not await put(one, bus, stream, name.format(1), stream.max_message_bytes + 1)
    assert (await bus.info(stream))["state"]["messages"] == 1


def test_every_bucket_in_memory_is_bounded() -> None:
    assert {stream for stream in STREAMS if stream.memory} == {ATTEMPTS, DEVICES, MEMBERS}
    assert all(
        stream.max_messages and stream.max_message_bytes for stream in STREAMS if stream.memory
    )


async def test_a_flood_ends_at_the_bound_of_the_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_server, "MEMORY_STORE_BYTES", 1 << 20)
    with BrokerServer(str(tmp_path / "store"), store_max_gib=64) as server:
        bus = await Bus.connect(server.url, "quick", name="operator", deadline_s=60)
        await bus.ensure_streams()
        async with stranger(server.url, "envhub", "quick") as one:
            puts = [put(one, bus, ATTEMPTS, f"t.x{number}", 2000) for number in range(1000)]
            stored = await asyncio.gather(*puts)
            assert 0 < sum(stored) < 1000
        # the last one may pass it
        assert (await bus.info(ATTEMPTS))["state"]["bytes"] <= (1 << 20) + 4096
        await bus.close()


@pytest.mark.parametrize("role", JOINING)
async def test_the_connections_of_a_role_are_bounded_and_others_connect(
    role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_config, "CONNECTIONS", 8)
    with BrokerServer(str(tmp_path / "store")) as server:
        keys = keys_of(server.url)
        for name in ("host-1", "host-2"):
            tokens.make_join_token(keys, server.url, role, "quick", name=name, expires_s=600)
        async with AsyncExitStack() as connections:
            for _ in range(3 * 8):  # two tokens, and the key of this user
                await connections.enter_async_context(stranger(server.url, role, "quick"))
            with pytest.raises(nats.errors.Error, match="maximum account active connections"):
                await connections.enter_async_context(stranger(server.url, role, "quick"))
            other = next(joining for joining in JOINING if joining != role)
            for run, free_role in (("quick", other), ("quick", "learner"), ("other", role)):
                async with stranger(server.url, free_role, run) as one:
                    await one.client.flush()
