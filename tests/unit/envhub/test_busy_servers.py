"""Servers without room: no failure, no lost time, and few requests in vain."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from test_generate import Client, ask, generator, presence, reply

from broker.contract import wire
from envhub.servers import generate

TURNS = 300
PLACES = 20  # of each server


class FullServer:
    """Takes so many requests of this hub at once."""

    def __init__(self, places: int, seconds: float = 0.005) -> None:
        self.places, self.seconds, self.most = places, seconds, 0
        self.requests = 0
        self.replies: Counter[str] = Counter()

    async def answer(self, request: wire.GenerateRequest) -> wire.GenerateReply:
        await asyncio.sleep(0)
        if self.requests >= self.places:
            self.replies["busy"] += 1
            return reply(request, [], "busy", error="too many requests")
        self.requests += 1
        self.most = max(self.most, self.requests)
        await asyncio.sleep(self.seconds)
        self.requests -= 1
        self.replies["stop"] += 1
        return reply(request, [7])


async def test_many_turns_share_full_servers() -> None:
    servers = {"a": FullServer(PLACES), "b": FullServer(2 * PLACES)}
    client = Client(**{name: server.answer for name, server in servers.items()})
    turns = generator(client, presence("a"), presence("b"))
    sampled = await asyncio.gather(
        *(turns.turn(ask(conversation_id=f"c{n}", timeout_s=300.0)) for n in range(TURNS))
    )
    assert [list(one.token_ids) for one in sampled] == [[7]] * TURNS
    assert turns.retries == 0
    assert {name: server.most for name, server in servers.items()} == {"a": PLACES, "b": 2 * PLACES}
    # each turn of the first burst may be refused once by each server, later ones hardly ever
    assert sum(server.replies["busy"] for server in servers.values()) < 2 * TURNS + TURNS / 10
    assert not turns._waiting


async def test_waiting_for_room_is_no_part_of_a_turns_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "FULL_PAUSE_S", 0.2)
    refusals = 4

    async def answer(request: wire.GenerateRequest) -> wire.GenerateReply:
        nonlocal refusals
        refusals -= 1
        full = refusals >= 0  # of requests of other hubs
        return (
            reply(request, [], "busy", error="too many requests") if full else reply(request, [7])
        )

    turns = generator(Client(a=answer), presence("a"))
    sampled = await turns.turn(ask(timeout_s=0.5))  # less than it waits
    assert (list(sampled.token_ids), turns.retries) == ([7], 0)
