"""Requests that wait for an answer: each gives up in its own time, by one timer for all of them."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import msgspec
import pytest
from waits import until

from broker.channel.client import RequestClient
from broker.contract import codec, wire
from broker.contract.examples import EXAMPLES
from broker.errors import RequestFailed

REQUEST = cast(wire.GenerateRequest, EXAMPLES[wire.GenerateRequest])
REPLY = cast(wire.GenerateReply, EXAMPLES[wire.GenerateReply])


class Carrier:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.posted: list[tuple[str, str]] = []
        self.aborted: list[str] = []

    def post(self, address: str, token: str, data: bytes, asker: object) -> bool:
        self.posted.append((token, codec.decode(data, wire.GenerateRequest).request_id))
        return True

    async def send(self, address: str, token: str, data: bytes) -> None:
        assert token == ""
        self.aborted.append(codec.decode(data, wire.AbortRequest).request_id)


async def failed_after(asker: RequestClient, name: str, timeout_s: float) -> float:
    """Seconds until the request gives up."""
    began = time.monotonic()
    with pytest.raises(RequestFailed, match=f"a: no answer within {timeout_s:g} s"):
        await asker.generate(
            "a", msgspec.structs.replace(REQUEST, request_id=name), timeout_s=timeout_s
        )
    return time.monotonic() - began


async def test_each_request_gives_up_in_its_own_time_and_is_aborted() -> None:
    carrier = Carrier()
    asker = RequestClient(cast(Any, None), carrier)
    order: list[str] = []

    async def give_up(name: str, timeout_s: float) -> float:
        seconds = await failed_after(asker, name, timeout_s)
        order.append(name)
        return seconds

    limits = {"middle": 0.4, "last": 0.8, "first": 0.1, "endless": 1e6}
    answered = asyncio.create_task(
        asker.generate("a", msgspec.structs.replace(REQUEST, request_id="answered"), timeout_s=0.3)
    )
    tasks = {name: asyncio.create_task(give_up(name, limit)) for name, limit in limits.items()}
    await until(lambda: len(carrier.posted) == 5)
    (token,) = (token for token, name in carrier.posted if name == "answered")
    asker.answered(token, codec.encode(msgspec.structs.replace(REPLY, request_id="answered")))
    assert (await answered).request_id == "answered"
    for name in ("first", "middle", "last"):
        assert await tasks[name] >= limits[name] - 0.002
    assert order == ["first", "middle", "last"]
    await until(lambda: carrier.aborted == ["first", "middle", "last"])
    assert not tasks["endless"].done()
    tasks["endless"].cancel()
    await asyncio.wait([tasks["endless"]])
    await asker.close()


async def test_many_requests_take_one_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    timers: list[float] = []
    real = loop.call_at

    def call_at(at: float, *rest: Any, **more: Any) -> asyncio.TimerHandle:
        timers.append(at)
        return real(at, *rest, **more)

    monkeypatch.setattr(loop, "call_at", call_at)
    carrier = Carrier()
    asker = RequestClient(cast(Any, None), carrier)
    tasks = [
        asyncio.create_task(
            asker.generate("a", msgspec.structs.replace(REQUEST, request_id=f"r{n}"), timeout_s=50)
        )
        for n in range(100)
    ]
    await asyncio.sleep(0)
    assert len(carrier.posted) == 100
    assert len(timers) == 1
    for token, name in carrier.posted:
        asker.answered(token, codec.encode(msgspec.structs.replace(REPLY, request_id=name)))
    assert [reply.request_id for reply in await asyncio.gather(*tasks)] == [
        f"r{n}" for n in range(100)
    ]
    await asker.close()
