"""The process of the HTTP API: what passes between it and the server, and what happens when it
dies.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from waits import LONG_S, until

from broker.contract import wire
from broker.errors import UserError
from rlearner_text.config import TinyModel
from rlearner_text.openai.backends import ServedModel
from rlearner_text.openai.token_events import TokenEvent, TokenListener
from rlearner_text.tiny import _write_tokenizer
from rlearner_workers.frames import pack_frame
from rollout.config import RolloutSection
from rollout.http import HttpApi, prepare_http
from rollout.http_link import ClientLeft, open_http_link

KEY = "a-key-of-these-tests"
TOKENS = [5, 9, 12, 7]
LOGPROBS = [-0.5, -1.25, 0.0, -3.0]


class Engine:
    """Samples the same tokens for everyone, two at a time; the second pair after ``go``."""

    def __init__(self) -> None:
        self.go, self.begun, self.cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.state, self.version = "serving", 3

    async def handle(
        self, request: wire.GenerateRequest, tap: TokenListener | None = None, /
    ) -> wire.GenerateReply:
        self.begun.set()
        if request.sampling.max_tokens == 1:
            raise ValueError("made to fail")
        if tap is not None:
            tap.on_tokens(TokenEvent(TOKENS[:1], LOGPROBS[:1], 3))
            tap.on_tokens(TokenEvent(TOKENS[1:2], LOGPROBS[1:2], 3))
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        if tap is not None:
            tap.on_tokens(TokenEvent(TOKENS[2:], LOGPROBS[2:], 4))
        return wire.GenerateReply(
            request_id=request.request_id,
            server="s",
            token_ids=wire.column(TOKENS, "<i4"),
            logprobs=wire.column(LOGPROBS, "<f4"),
            version_runs=wire.column([3, 2, 4, 2], "<i4"),
            finish_reason="length",
            policy_version=4,
        )


class Served:
    def __init__(self, api: HttpApi, engine: Engine, address: str) -> None:
        self.api, self.engine, self.address = api, engine, address
        self.client = aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"})

    def ask(self, **fields: Any) -> Any:
        body = {"prompt": [4, 6], "max_tokens": 4, "ignore_eos": True, "logprobs": 0} | fields
        return self.client.post(f"{self.address}/completions", json=body)

    async def health(self) -> tuple[int, Any]:
        async with self.client.get(self.address.removesuffix("/v1") + "/health") as response:
            return response.status, await response.json()


@pytest.fixture
async def served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[Served]:
    monkeypatch.setenv("RL_API_KEY", KEY)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    caplog.set_level(logging.INFO)
    (tmp_path / "model").mkdir()
    _write_tokenizer(tmp_path / "model", TinyModel())
    engine, path = Engine(), str(tmp_path / "model")
    model = ServedModel("actor", path, 64, lambda: engine.state, lambda: engine.version)
    args = {"bind": "127.0.0.1", "port": 0, "trust_remote_code": False}
    api = await prepare_http(engine.handle, model, RolloutSection(), **args)  # type: ignore[arg-type]
    await api.listen()
    said = next(record.getMessage() for record in caplog.records if "API at" in record.getMessage())
    found = Served(api, engine, said.split("API at ")[1].split(",")[0])
    try:
        yield found
    finally:
        await found.client.close()
        await api.close()


async def test_a_stream_has_every_token_and_its_answer(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    async with asyncio.timeout(LONG_S), served.ask(stream=True) as response:
        chunks: list[Any] = []
        async for line in response.content:
            if line.startswith(b"data: {"):
                chunks.append(json.loads(line[6:])["choices"][0])
                served.engine.go.set()  # the first tokens come while the request runs
    assert [token for one in chunks for token in one.get("token_ids", [])] == TOKENS
    assert [
        value for one in chunks if one["logprobs"] for value in one["logprobs"]["token_logprobs"]
    ] == LOGPROBS
    assert chunks[0]["token_ids"] == TOKENS[:2]
    assert [one["version_runs"] for one in chunks if "version_runs" in one] == [[[3, 2]], [[4, 2]]]
    assert chunks[-1]["finish_reason"] == "length"
    # its access log comes out here
    await until(lambda: "2+4 POST '/v1/completions' 200" in caplog.text)


async def test_an_engine_that_raises_costs_one_request(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    served.engine.go.set()
    async with served.ask(max_tokens=1) as response:
        assert response.status == 500
        assert "made to fail" not in await response.text()
    assert "made to fail" in caplog.text
    async with served.ask() as response:
        assert (await response.json())["choices"][0]["token_ids"] == TOKENS


@pytest.mark.parametrize("field", ["top_k", "seed", "min_version", "n"])
async def test_numbers_that_no_message_holds_are_refused(served: Served, field: str) -> None:
    served.engine.go.set()
    async with served.ask(**{field: 10**20}) as response:
        assert (response.status, field in await response.text()) == (400, True)
    async with served.ask() as response:
        assert response.status == 200


async def test_a_client_that_leaves_cancels_its_request(served: Served) -> None:
    asking = asyncio.ensure_future(served.ask().__aenter__())
    async with asyncio.timeout(LONG_S):
        await served.engine.begun.wait()
        asking.cancel()
        await served.engine.cancelled.wait()


async def test_health_follows_the_server(served: Served) -> None:
    assert await served.health() == (200, {"status": "serving", "policy_version": 3})
    served.engine.state, served.engine.version = "draining", 8

    async def drains() -> bool:
        return await served.health() == (503, {"status": "draining", "policy_version": 8})

    await until(drains)


async def test_a_process_that_dies_is_started_again(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    asking = asyncio.ensure_future(served.ask().__aenter__())
    process = served.api._process
    assert process is not None
    async with asyncio.timeout(LONG_S):
        await served.engine.begun.wait()
        process.kill()
        with pytest.raises(aiohttp.ClientError):
            await asking
        await served.engine.cancelled.wait()
        served.engine.go.set()
        while True:
            try:
                async with served.ask() as response:
                    answer = await response.json()
                break
            except aiohttp.ClientError:
                await asyncio.sleep(0.05)
    assert answer["choices"][0]["token_ids"] == TOKENS
    assert "the process of the HTTP API ended; starting it again" in caplog.text


async def test_closing_lets_clients_read_what_is_complete(served: Served) -> None:
    asking = asyncio.ensure_future(served.ask().__aenter__())
    async with asyncio.timeout(LONG_S):
        await served.engine.begun.wait()
        process = served.api._process
        served.engine.go.set()
        await until(lambda: not served.api._answering)
        await served.api.close()
        async with await asking as response:
            assert (await response.json())["choices"][0]["token_ids"] == TOKENS
    assert process is not None
    assert process.returncode is not None
    with pytest.raises(aiohttp.ClientError):
        await served.health()


async def test_a_link_sends_nothing_after_its_end_and_ends_with_what_is_no_message() -> None:
    one, other = socket.socketpair()
    link, far = await open_http_link(one), await open_http_link(other)
    link.send(ClientLeft(7))
    link.end()
    link.send(ClientLeft(8))
    assert [await far.receive_or_none(), await far.receive_or_none()] == [ClientLeft(7), None]
    far._writer.write(pack_frame(b"\xc1\xc1\xc1"))
    assert await link.receive_or_none() is None
    link.close()
    far.close()


async def test_a_process_that_cannot_be_spawned_leaves_no_socket_open(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = socket.socketpair()
    monkeypatch.setattr(socket, "socketpair", lambda: pair)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    await served.api._reap()
    with pytest.raises(FileNotFoundError):
        await served.api._start()
    assert [one.fileno() for one in pair] == [-1, -1]


async def test_a_process_that_does_not_start_is_no_port_that_is_taken(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    await served.api._reap()
    with pytest.raises(
        UserError,
        match=r"^the process of the HTTP API ended before it listened; see its last lines",
    ):
        await served.api._start()
