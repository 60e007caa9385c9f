"""Anthropic's protocol on a rollout server, in this process: messages, streams, errors, models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from http_kit import KEY, Api, api

from broker.contract import wire
from rlearner_text.config import TinyModel
from rlearner_text.openai import streaming
from rlearner_text.openai.backends import ServedModel
from rlearner_text.openai.http_errors import HttpError
from rlearner_text.openai.server import HttpServer
from rlearner_text.openai.token_events import TokenEvent, TokenListener
from rlearner_text.tiny import _write_tokenizer
from rlearner_text.tokenizer import Tokenizer

HELLO = [{"role": "user", "content": "hello"}]
ASK = {"model": "actor", "messages": HELLO, "max_tokens": 9, "seed": 7, "ignore_eos": True}
VERSION = {"anthropic-version": "2023-06-01"}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("http")
    _write_tokenizer(folder, TinyModel())
    return str(folder)


@pytest.fixture
async def served(model_path: str) -> AsyncIterator[Api]:
    async with api(model_path) as made:
        yield made


async def read_events(response: aiohttp.ClientResponse) -> list[dict[str, Any]]:
    blocks = [block.split("\n") for block in (await response.text()).split("\n\n") if block]
    events = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name for name, _ in blocks] == [f"event: {event['type']}" for event in events]
    return events


async def test_a_message_is_the_answer_to_a_chat(served: Api) -> None:
    chat = await served.post("/chat/completions", ASK)
    (choice,) = chat["choices"]
    message = await served.post("/messages?beta=true", ASK | {"return_token_ids": True})
    assert message["content"] == [{"type": "text", "text": choice["message"]["content"]}]
    assert (message["token_ids"], message["prompt_token_ids"]) == (
        choice["token_ids"],
        chat["prompt_token_ids"],
    )
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == ("max_tokens", 9)
    counted = await served.post("/messages/count_tokens", {"model": "actor", "messages": HELLO})
    assert counted == {"input_tokens": chat["usage"]["prompt_tokens"]}


async def test_a_stream_brings_what_the_message_holds(model_path: str) -> None:
    async with api(model_path, delay_s=0.01) as served:
        whole = await served.post("/messages", ASK)
        async with served.client.post(
            served.address + "/messages", json=ASK | {"stream": True}
        ) as response:
            assert (response.status, response.content_type) == (200, "text/event-stream")
            events = await read_events(response)
    kinds = [event["type"] for event in events if event["type"] != "content_block_delta"]
    assert kinds == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    text = "".join(
        event["delta"].get("text", "") for event in events if "index" in event and "delta" in event
    )
    assert [{"type": "text", "text": text}] == whole["content"]
    assert events[-2]["usage"] == whole["usage"]


async def test_a_stream_without_tokens_is_kept_alive(
    model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "PING_S", 0.05)
    async with api(model_path, delay_s=0.4) as served:
        body = ASK | {"stream": True, "max_tokens": 3}
        async with served.client.post(served.address + "/messages", json=body) as response:
            events = await read_events(response)
    # two pauses of 0.4 s after the first token, and the one with which every stream begins
    assert sum(event["type"] == "ping" for event in events) > 3


async def test_an_error_in_a_stream_is_its_last_event(model_path: str) -> None:
    async def fail(ask: wire.GenerateRequest, listener: TokenListener | None = None, /) -> Any:
        assert listener is not None
        listener.on_tokens(TokenEvent(tokenizer.encode("so"), [-1.0] * 2, 0))
        await asyncio.sleep(0.05)
        raise HttpError(500, "the engine failed: no power")

    tokenizer = Tokenizer.load(model_path)
    served_model = ServedModel("actor", model_path, 128, lambda: "serving", lambda: 0)
    server = HttpServer.with_key(fail, tokenizer, served_model, KEY)
    await server.start("127.0.0.1", 0)
    try:
        async with (
            aiohttp.ClientSession(headers={"x-api-key": KEY}) as client,
            client.post(f"{server.address}/messages", json=ASK | {"stream": True}) as response,
        ):
            *events, last = await read_events(response)
    finally:
        await server.close()
    assert "content_block_delta" in [event["type"] for event in events]
    problem = {"type": "api_error", "message": "the engine failed: no power"}
    assert last == {"type": "error", "error": problem}


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "says"),
    [
        (
            "/messages",
            ASK | {"model": "claude-9"},
            404,
            "not_found_error",
            "there is no model 'claude-9', only 'actor'",
        ),
        (
            "/messages",
            ASK | {"max_tokens": None},
            400,
            "invalid_request_error",
            "max_tokens must be given",
        ),
        (
            "/messages",
            ASK | {"messages": [{"role": "user", "content": "a " * 200}]},
            400,
            "invalid_request_error",
            "prompt is too long: the prompt has ",
        ),
        ("/messages", {"a": "a" * 9_000_000}, 413, "request_too_large", "the body is larger than"),
        (
            "/messages/batches",
            {},
            404,
            "not_found_error",
            "POST /v1/messages/batches: not found",
        ),
    ],
    ids=["model", "most", "long", "large", "path"],
)
async def test_errors_have_the_form_of_the_protocol(
    served: Api, path: str, body: Any, status: int, kind: str, says: str
) -> None:
    answer = await served.post(path, body, status)
    assert (answer["type"], answer["error"]["type"]) == ("error", kind)
    assert answer["error"]["message"].startswith(says)
    assert set(answer["error"]) == {"type", "message"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": KEY}, 200),
        ({"Authorization": f"Bearer {KEY}"}, 200),
        ({"x-api-key": KEY, "Authorization": "Bearer another"}, 200),
        ({"x-api-key": "another"}, 401),
        ({}, 401),
    ],
)
async def test_keys(served: Api, headers: dict[str, str], status: int) -> None:
    async with (
        aiohttp.ClientSession(headers=headers) as client,
        client.post(f"{served.address}/messages", json=ASK) as response,
    ):
        assert response.status == status
        if status == 401:
            assert (await response.json())["error"]["type"] == "authentication_error"


async def test_models_in_both_forms(served: Api) -> None:
    async with served.client.get(f"{served.address}/models", headers=VERSION) as response:
        listed = await response.json()
    (model,) = listed["data"]
    assert (model["type"], model["id"], model["display_name"]) == ("model", "actor", "actor")
    assert listed == {"data": [model], "has_more": False, "first_id": "actor", "last_id": "actor"}
    async with served.client.get(f"{served.address}/models/actor", headers=VERSION) as response:
        assert await response.json() == model
    async with served.client.get(f"{served.address}/models/actor") as response:
        assert (await response.json())["object"] == "model"
    async with served.client.get(f"{served.address}/models/a/b", headers=VERSION) as response:
        assert (response.status, (await response.json())["type"]) == (404, "error")


async def test_a_client_may_look_without_a_key(served: Api) -> None:
    root = served.address.removesuffix("/v1")
    async with aiohttp.ClientSession() as client:
        async with client.head(root) as response:
            assert (response.status, await response.read()) == (200, b"")
        async with client.get(f"{root}/") as response:
            assert await response.json() == {"name": "rlearner"}
