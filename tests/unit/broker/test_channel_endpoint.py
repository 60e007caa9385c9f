"""The server side of a channel: room for requests."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from waits import until

from broker.channel.endpoint import RequestEndpoint, RequestLimits, error_reply
from broker.contract import codec, wire


def request(name: str, tokens: int = 3) -> wire.GenerateRequest:
    return wire.GenerateRequest(
        request_id=name,
        conversation_id="c",
        token_ids=wire.column(range(tokens), "<i4"),
        sampling=wire.SamplingParams(max_tokens=4),
    )


@pytest.mark.parametrize(
    ("limits", "tokens", "text"),
    [
        (RequestLimits(count=2), 3, "too many requests at once: 2, of 0 MiB"),
        (
            RequestLimits(count_of_client=2),
            3,
            "too many requests of this client at once: 2, of 0 MiB",
        ),
        (
            RequestLimits(bytes_of_client=5 << 19),
            1 << 18,
            "too many requests of this client at once: 2, of 2 MiB",
        ),
    ],
)
async def test_request_without_room_gets_a_busy_reply(
    limits: RequestLimits, tokens: int, text: str
) -> None:
    release, replies = asyncio.Event(), list[Any]()

    async def handle(asked: wire.GenerateRequest) -> wire.GenerateReply:
        await release.wait()
        nothing = wire.column((), "<i4")
        return wire.GenerateReply(
            request_id=asked.request_id,
            server="s",
            token_ids=nothing,
            logprobs=wire.column((), "<f4"),
            version_runs=nothing,
            finish_reason="stop",
            policy_version=1,
        )

    async def note(data: bytes) -> None:
        replies.append(codec.decode(data, wire.GenerateReply))

    endpoint = RequestEndpoint(None, "s", handle, lambda _: None, limits)  # type: ignore[arg-type]
    for name in ("r1", "r2", "r3"):
        endpoint.receive(codec.encode(request(name, tokens)), note, "hub")
    await until(lambda: replies)
    assert [(one.request_id, one.finish_reason, one.error) for one in replies] == [
        ("r3", "busy", text)
    ]
    release.set()
    await until(lambda: len(replies) == 3 and not endpoint._load)
    endpoint.receive(codec.encode(request("r4", tokens)), note, "hub")  # there is room again
    await until(lambda: len(replies) == 4)
    assert sorted(one.finish_reason for one in replies) == ["busy", "stop", "stop", "stop"]


async def test_flood_of_one_client_drops_no_request_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All that arrived between two turns of the loop becomes tasks before any of them is answered."""
    monkeypatch.setattr("broker.channel.endpoint.MAX_TASKS", 64)
    release, replies = asyncio.Event(), list[Any]()

    async def handle(asked: wire.GenerateRequest) -> wire.GenerateReply:
        await release.wait()
        return error_reply("s", asked.request_id, "over")

    async def note(data: bytes) -> None:
        replies.append(codec.decode(data, wire.GenerateReply).request_id)

    endpoint = RequestEndpoint(None, "s", handle, lambda _: None)  # type: ignore[arg-type]
    for number in range(200):
        endpoint.receive(codec.encode(request(f"evil-{number}")), note, "evil")
    for name in ("first", "second"):
        endpoint.receive(codec.encode(request(name)), note, name)
    release.set()
    await until(lambda: not endpoint._answering)
    assert replies[-2:] == ["first", "second"]
    assert 16 <= len(replies) - 2 <= 64
    assert not endpoint._tasks
