"""What a stranger can try against the TLS of the HTTP API, each attempt watched by a second client
from outside.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import time
import warnings
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from http_kit import KEY, Api, api
from https_kit import Issued, issue

from rlearner_text.config import TinyModel
from rlearner_text.openai.connections import Limits
from rlearner_text.tiny import _write_tokenizer

LIMITS = Limits(total=64, per_peer=48, arrival_s=1.0)
REQUEST = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nConnection: close\r\n\r\n".encode()


@pytest.fixture
def issued(tmp_path: Path) -> Issued:
    return issue(tmp_path / "tls")


@pytest.fixture
async def served(tmp_path: Path, issued: Issued) -> AsyncIterator[Api]:
    _write_tokenizer(tmp_path, TinyModel())
    async with api(str(tmp_path), tls=issued) as made:
        made.server._connections.limits = LIMITS
        yield made


def port_of(served: Api) -> int:
    return int(served.address.rsplit(":", 1)[1].removesuffix("/v1"))


async def assert_healthy(served: Api, issued: Issued) -> None:
    """A client with the authority gets /health within a second over TLS, and tokens with the key."""
    began = time.monotonic()
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=issued.client())) as client,
        client.get(served.address.removesuffix("/v1") + "/health") as answer,
    ):
        assert answer.status == 200
    assert time.monotonic() - began < 1
    made = await served.post("/completions", {"prompt": "hi", "max_tokens": 2, "ignore_eos": True})
    assert len(made["choices"][0]["token_ids"]) == 2


async def test_plain_http_on_the_tls_port_gets_no_answer(
    served: Api, issued: Issued, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(served))
    writer.write(REQUEST)
    async with asyncio.timeout(5):
        answer = await reader.read()
    writer.close()
    assert b"HTTP/1" not in answer
    assert b"policy_version" not in answer
    assert [line for line in caplog.messages if "no TLS connection" in line] == [
        "127.0.0.1 no TLS connection: HTTP_REQUEST"
    ]
    assert KEY not in caplog.text
    await assert_healthy(served, issued)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1])
async def test_old_tls_versions_are_refused(
    served: Api, issued: Issued, version: ssl.TLSVersion, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    old = issued.client()
    old.set_ciphers("ALL:@SECLEVEL=0")  # OpenSSL offers these versions only so
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        old.minimum_version = old.maximum_version = version
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await asyncio.open_connection("127.0.0.1", port_of(served), ssl=old)
    await asyncio.sleep(0.1)
    assert [line for line in caplog.messages if "no TLS" in line] == [
        "127.0.0.1 no TLS connection: UNSUPPORTED_PROTOCOL"
    ]
    await assert_healthy(served, issued)


async def test_a_certificate_of_another_host_gets_no_key(tmp_path: Path) -> None:
    """A server that pretends to be ours with a certificate of its own authority's other host never
    sees the key.
    """
    _write_tokenizer(tmp_path, TinyModel())
    other = issue(tmp_path / "tls", "192.0.2.7")
    received: list[bytes] = []

    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.read(4096))
        writer.close()

    server = await asyncio.start_server(pretend, "127.0.0.1", 0, ssl=other.server())
    port = server.sockets[0].getsockname()[1]
    async with (
        server,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=other.client())) as client,
    ):
        headers = {"Authorization": f"Bearer {KEY}"}
        with pytest.raises(aiohttp.ClientConnectorCertificateError, match="IP address mismatch"):
            await client.get(f"https://127.0.0.1:{port}/v1/models", headers=headers)
        await asyncio.sleep(0.1)
    assert KEY.encode() not in b"".join(received)


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00\x01"])
async def test_half_open_handshakes_do_not_silence_health(
    served: Api, issued: Issued, sent: bytes
) -> None:
    opened = [await asyncio.open_connection("127.0.0.1", port_of(served)) for _ in range(150)]
    for _, writer in opened:
        writer.write(sent)
    await asyncio.sleep(0.1)
    assert 0 < len(served.server._connections._peers) <= LIMITS.per_peer
    await assert_healthy(served, issued)
    began = time.monotonic()
    async with asyncio.timeout(5):  # the rest is closed once its time is over
        for reader, _ in opened:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
    assert time.monotonic() - began < 3
    for _, writer in opened:
        writer.close()
    await assert_healthy(served, issued)


async def test_half_open_requests_after_the_handshake_do_not_silence_health(
    served: Api, issued: Issued
) -> None:
    tls, port = issued.client(), port_of(served)
    opened = await asyncio.gather(
        *(asyncio.open_connection("127.0.0.1", port, ssl=tls) for _ in range(40))
    )
    opened += [await asyncio.open_connection("127.0.0.1", port, ssl=tls) for _ in range(40)]
    for _, writer in opened:
        writer.write(REQUEST[:40])
    await asyncio.sleep(0.1)
    assert 0 < len(served.server._connections._peers) <= LIMITS.per_peer
    await assert_healthy(served, issued)
    for _, writer in opened:
        writer.transport.abort()


async def test_bytes_that_are_no_tls_cost_only_their_connection(
    served: Api, issued: Issued, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(served))
    writer.write(b"\xff" * 100_000)
    async with asyncio.timeout(5):
        try:
            answer = await reader.read()
        except ConnectionError:
            answer = b""
    writer.close()
    assert len(answer) < 20  # at most an alert
    assert not [one for one in caplog.records if one.exc_info]
    await assert_healthy(served, issued)
