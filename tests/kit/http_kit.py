"""A rollout server's HTTP API in this process: the real service, an engine in this process, no
broker.
"""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
from https_kit import Issued

from broker.contract import wire
from broker.runtime.process import Member
from broker.runtime.spans import SpanRecorder
from broker.settings.registry import resolve
from rlearner_text.openai.named_keys import KeyStore
from rlearner_text.openai.server import HttpServer
from rlearner_text.tokenizer import Tokenizer
from rollout.config import RolloutSection
from rollout.engines import ENGINES
from rollout.engines.base import EngineConfig
from rollout.http import served_model
from rollout.service import RolloutService

KEY = "a-key-of-these-tests"


@dataclass
class Api:
    """The server, what is behind it, and a client that knows its key."""

    service: RolloutService
    engine: Any
    tokenizer: Tokenizer
    server: HttpServer
    address: str
    client: aiohttp.ClientSession

    async def post(self, path: str, body: Any, status: int = 200, key: str | None = None) -> Any:
        """Return the answer; ``key``: None: that of these tests."""
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        data = io.BytesIO(json.dumps(body).encode())
        async with self.client.post(self.address + path, data=data, headers=headers) as response:
            answer = await response.json()
            assert response.status == status, answer
            return answer


@asynccontextmanager
async def api(
    model_path: str,
    *,
    engine: str = "random",
    max_context_tokens: int = 128,
    state: str = "serving",
    tls: Issued | None = None,
    key_store: KeyStore | None = None,
    **engine_args: Any,
) -> AsyncIterator[Api]:
    section = RolloutSection(
        engine=engine,
        max_running=4,
        max_context_tokens=max_context_tokens,
        engine_args=engine_args,
        num_threads=1,
    )
    spec = wire.RunSpec(
        run="r", wire_version=wire.WIRE_VERSION, epoch=0, config={}, model_path=model_path
    )
    running = resolve("engines", engine, ENGINES)(
        EngineConfig(model_path, section, device="cpu", policy_version=0)
    )
    member = cast(
        Member,
        SimpleNamespace(spec=spec, bus=None, id="s1", poke=lambda: None, spans=SpanRecorder()),
    )
    service, tokenizer = RolloutService(member, spec, section, running), Tokenizer.load(model_path)
    served = served_model(running, section, model_path, lambda: state)
    server = HttpServer.with_key(
        service.handle, tokenizer, served, KEY, tls.server() if tls else None, key_store
    )
    await running.start()
    await server.start("127.0.0.1", 0)
    try:
        connector = aiohttp.TCPConnector(ssl=tls.client() if tls else True)
        headers = {"Authorization": f"Bearer {KEY}"}
        async with aiohttp.ClientSession(headers=headers, connector=connector) as client:
            yield Api(service, running, tokenizer, server, server.address, client)
    finally:
        await server.close()
        await service.close()
