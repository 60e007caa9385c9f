"""What a stranger can try against the HTTP API, each attempt watched by a second client from
outside.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from http_kit import KEY, Api, api

from rlearner_text.config import TinyModel
from rlearner_text.openai.connections import Connections, Limits
from rlearner_text.tiny import _write_tokenizer

LIMITS = Limits(total=64, per_peer=48, arrival_s=1.0)
BODY = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}).encode()
AUTH = f"Authorization: Bearer {KEY}\r\n"
START = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Api]:
    _write_tokenizer(tmp_path, TinyModel())
    async with api(str(tmp_path)) as made:
        made.server._connections.limits = LIMITS
        yield made


def port_of(served: Api) -> int:
    return int(served.address.rsplit(":", 1)[1].removesuffix("/v1"))


async def send(served: Api, data: bytes, seconds: float = 5.0) -> bytes:
    """Return all that the server answers until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(served))
    writer.write(data)
    try:
        async with asyncio.timeout(seconds):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def assert_healthy(served: Api) -> None:
    """A stranger to the attack gets /health within a second, on a connection of its own, and tokens
    with the key.
    """
    began = time.monotonic()
    async with (
        aiohttp.ClientSession() as client,
        client.get(served.address.removesuffix("/v1") + "/health") as answer,
    ):
        assert answer.status == 200
    assert time.monotonic() - began < 1
    made = await served.post("/completions", {"prompt": "hi", "max_tokens": 2, "ignore_eos": True})
    assert len(made["choices"][0]["token_ids"]) == 2


@pytest.mark.parametrize(
    "header",
    ["", "Authorization: Bearer wrong-key-of-a-stranger\r\n", "Authorization: Basic eA==\r\n"],
)
async def test_requests_without_the_key_get_401(served: Api, header: str) -> None:
    head = f"{START}{header}Connection: close\r\nContent-Length: {len(BODY)}\r\n\r\n"
    answer = await send(served, head.encode() + BODY)
    assert answer.startswith(b"HTTP/1.1 401")
    assert b"choices" not in answer
    await assert_healthy(served)


@pytest.mark.parametrize("half", [START, START + AUTH + "Content-Length: 100\r\n\r\n{", ""])
async def test_half_open_requests_do_not_silence_health(served: Api, half: str) -> None:
    opened = [await asyncio.open_connection("127.0.0.1", port_of(served)) for _ in range(150)]
    for _, writer in opened:
        writer.write(half.encode())
    await asyncio.sleep(0.1)
    await assert_healthy(served)
    assert len(served.server._connections._peers) <= LIMITS.per_peer
    for _, writer in opened:
        writer.close()


async def test_a_header_sent_byte_by_byte_is_cut_off(served: Api) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(served))
    began = time.monotonic()
    writer.write(f"{START}X-Slow: ".encode())
    while not (reader.at_eof() or writer.is_closing()) and time.monotonic() - began < 5:
        writer.write(b"G")
        await asyncio.sleep(0.1)
    assert 0.5 < time.monotonic() - began < 3
    writer.close()
    await assert_healthy(served)


async def test_a_slow_body_gets_408(served: Api) -> None:
    began = time.monotonic()
    answer = await send(served, f"{START}{AUTH}Content-Length: 100\r\n\r\n{{".encode())
    assert answer.startswith(b"HTTP/1.1 408")
    assert 0.5 < time.monotonic() - began < 4
    await assert_healthy(served)


async def test_a_huge_body_is_refused_before_it_is_read(served: Api) -> None:
    answer = await send(served, f"{START}{AUTH}Content-Length: 99999999999\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 413")
    await assert_healthy(served)


@pytest.mark.parametrize("head", ["X: " + "a" * 100_000 + "\r\n", "X: a\r\n" * 1000])
async def test_huge_headers_get_400(served: Api, head: str) -> None:
    answer = await send(served, f"GET /v1/models HTTP/1.1\r\nHost: x\r\n{AUTH}{head}\r\n".encode())
    assert answer.startswith(b"HTTP/1.0 400") or not answer  # reset if more was sent than read
    assert b"policy_version" not in answer
    await assert_healthy(served)


async def test_two_lengths_are_refused(served: Api) -> None:
    smuggled = f"0\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: x\r\n{AUTH}\r\n"
    both = f"{START}{AUTH}Content-Length: {len(smuggled)}\r\nTransfer-Encoding: chunked\r\n\r\n{smuggled}"
    assert (await send(served, both.encode())).startswith(b"HTTP/1.0 400")
    twice = f"{START}{AUTH}Content-Length: 5\r\nContent-Length: 50\r\n\r\n{smuggled}"
    assert (await send(served, twice.encode())).startswith(b"HTTP/1.0 400")
    await assert_healthy(served)


async def test_deep_json_is_the_clients_mistake(served: Api) -> None:
    body = b'{"messages":' + b"[" * 200_000
    head = f"{START}{AUTH}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    assert (await send(served, head.encode() + body)).startswith(b"HTTP/1.1 400")
    await assert_healthy(served)


@pytest.mark.parametrize(
    "path", ["/../../etc/passwd", "/v1/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd"]
)
async def test_paths_lead_to_no_file(served: Api, path: str) -> None:
    answer = await send(
        served, f"GET {path} HTTP/1.1\r\nHost: x\r\n{AUTH}Connection: close\r\n\r\n".encode()
    )
    assert answer.split()[1] in (b"400", b"404")
    assert b"root:" not in answer
    await assert_healthy(served)


async def test_the_access_log_is_one_line_without_prompt_key_and_control_characters(
    served: Api, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    forged = f"GET /%0a2026%20forged%1b[31m?secret-query HTTP/1.1\r\nHost: x\r\n{AUTH}Connection: close\r\n\r\n"
    assert (await send(served, forged.encode())).split()[1] == b"404"
    await served.post(
        "/chat/completions", {"messages": [{"role": "user", "content": "secret"}], "max_tokens": 2}
    )
    lines = [record.getMessage() for record in caplog.records if record.name.endswith(".access")]
    assert [line.split()[-3] for line in lines] == ["404", "200"]
    assert "POST '/v1/chat/completions' 200" in lines[1]
    assert all(line.isprintable() and KEY not in line and "secret" not in line for line in lines)


async def test_a_full_peer_does_not_shut_out_another() -> None:
    full = Connections(Limits(total=3, per_peer=2))
    one, two, three, four, five = (object() for _ in range(5))
    assert full.add(one, "a") is None
    assert full.add(two, "a") is None
    assert full.add(three, "b") is None  # type: ignore[arg-type]
    full.work(one, busy=True)  # type: ignore[arg-type]
    assert full.add(four, "a") is two  # type: ignore[arg-type]
    full.work(four, busy=True)  # type: ignore[arg-type]
    assert full.add(five, "a") is five  # type: ignore[arg-type]
