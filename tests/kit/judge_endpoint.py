"""A judge's endpoint that answers from a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


def said(text: str) -> tuple[int, Any]:
    """Return an answer of 20 tokens to a question of 100."""
    return 200, {
        "choices": [{"message": {"content": text}}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 20},
    }


class Endpoint:
    """Answers in turn, the last one for ever; keeps what it was asked."""

    def __init__(self, *answers: Any, models: tuple[str, ...] = ("m1",), status: int = 200) -> None:
        self.answers, self.models, self.status = list(answers), models, status
        self.asked: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.at_once = self.most_at_once = 0
        self.delay_s = 0.0

    async def handle(self, request: web.Request) -> web.Response:
        self.keys.add(request.headers.get("Authorization"))
        if request.method == "GET":
            return web.json_response(
                {"data": [{"id": name} for name in self.models]} if self.status == 200 else {},
                status=self.status,
            )
        self.asked.append(await request.json())
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(self.delay_s)
        self.at_once -= 1
        return web.json_response(answer[1], status=answer[0])


@asynccontextmanager
async def serve_endpoint(endpoint: Endpoint) -> AsyncIterator[str]:
    """Serve an endpoint on a free port and yield its address."""
    app = web.Application()
    app.router.add_route("*", "/v1/{rest:.*}", endpoint.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()
