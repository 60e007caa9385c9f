"""Replies of an endpoint that are no proper JSON: tried again, then refused in one line."""

from __future__ import annotations

import re

import pytest
from aiohttp import web

from rlearner_text.openai.client import EndpointClient


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (
            b'{"a": "\xff"}',
            "the answer is not valid JSON: invalid start byte at byte 7; it must be UTF-8",
        ),
        (
            rb'{"a": "\ud83d"}',
            "the answer is not valid JSON: it holds half of a surrogate pair, which is not text",
        ),
        (b'{"a": NaN}', "the answer is not valid JSON: it holds NaN"),
        (b'{"a": -1e999}', "the answer is not valid JSON: the number -1e999 is too large"),
        (b"[1]", "the answer is not a JSON object"),
    ],
)
async def test_a_reply_that_is_no_proper_json(raw: bytes, problem: str) -> None:
    async def reply(_: web.Request) -> web.Response:
        asked.append(1)
        return web.Response(body=raw, content_type="application/json")

    asked: list[int] = []
    app = web.Application()
    app.router.add_post("/v1/x", reply)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    endpoint = EndpointClient(
        f"http://127.0.0.1:{runner.addresses[0][1]}/v1", "", timeout_s=30.0, retries=1, base_s=0.01
    )
    try:
        with pytest.raises(RuntimeError, match=f"gave no answer in 2 tries: {re.escape(problem)}$"):
            await endpoint.post("/x", {})
    finally:
        await endpoint.close()
        await runner.cleanup()
    assert len(asked) == 2
