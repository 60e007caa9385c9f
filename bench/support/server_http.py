"""The client of ``bench.server`` for HTTP: each request is a stream of the OpenAI-compatible API, a
chunk per token.
"""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from broker.contract import wire
from rlearner_text.config import TinyModel
from rlearner_text.tiny import _write_tokenizer

KEY: Final = "the-key-of-this-benchmark"
_SAID: Final = re.compile(r"API at (\S+),")
_json: Final = msgspec.json.Decoder()


def add_tokenizer(folder: Path) -> None:
    """The API needs one; tokens that it does not know print nothing."""
    _write_tokenizer(folder, TinyModel())


class StreamedServer:
    """Client of the server with this log; ``chunks``: received in the last run."""

    def __init__(self, log: Path) -> None:
        found = _SAID.search(log.read_text())
        if found is None:
            raise RuntimeError(f"the server has no HTTP API, see {log}")
        self._url = f"{found[1]}/completions"
        self.chunks = 0

    async def run(self, requests: list[wire.GenerateRequest]) -> tuple[float, list[list[int]]]:
        """Seconds, and the tokens of every request."""
        self.chunks = 0
        headers = {"Authorization": f"Bearer {KEY}"}
        async with aiohttp.ClientSession(
            headers=headers, connector=aiohttp.TCPConnector(limit=0)
        ) as session:
            began = time.perf_counter()
            tokens = list(
                await asyncio.gather(*(self._one(session, request) for request in requests))
            )
            return time.perf_counter() - began, tokens

    async def _one(
        self, session: aiohttp.ClientSession, request: wire.GenerateRequest
    ) -> list[int]:
        body: dict[str, Any] = {
            "prompt": request.token_ids.array().tolist(), "max_tokens": request.sampling.max_tokens, "temperature": 0,
            "ignore_eos": True, "logprobs": 0, "stream": True, "prompt_cache_key": request.conversation_id,
        }  # fmt: skip
        tokens: list[int] = []
        async with session.post(self._url, json=body) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    (choice,) = _json.decode(line[6:])["choices"]
                    tokens += choice.get("token_ids", ())
                    self.chunks += 1
        if len(tokens) != request.sampling.max_tokens:
            raise RuntimeError(
                f"{request.request_id}: {len(tokens)} tokens instead of {request.sampling.max_tokens}"
            )
        return tokens
