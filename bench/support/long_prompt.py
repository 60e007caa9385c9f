"""Measures how long an HTTP server is silent while it reads a prompt of 8 MB.

    python -m bench.support.long_prompt

The server is a process of its own, as that of a rollout server; its context is so large that the
prompt is encoded before it is refused.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from broker.contract import wire
from rlearner_text.config import TinyModel
from rlearner_text.openai.backends import ServedModel
from rlearner_text.openai.server import HttpServer
from rlearner_text.tiny import _write_tokenizer
from rlearner_text.tokenizer import Tokenizer

KEY: Final = "key-of-the-long-prompt"
PROMPT_BYTES: Final = 8_000_000
CONTEXT: Final = 131_072  # tokens; as many characters are not refused before they are encoded
POLL_S: Final = 0.01
BASELINE: Final = 20  # requests
TEXTS: Final = {"spaces": " ", "letters": "a", "turns": "<|im_start|>user\n", "openings": "<|"}


async def _serve(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)

    async def handle(request: wire.GenerateRequest, tap: object = None, /) -> wire.GenerateReply:
        raise AssertionError("the prompt does not fit")

    served = ServedModel("m", str(folder), CONTEXT, lambda: "serving", lambda: 1)
    server = HttpServer.with_key(handle, tokenizer, served, KEY)
    await server.start("127.0.0.1", 0)
    print(server.address, flush=True)
    await asyncio.Event().wait()


def measure(text: str, *, path: str = "/chat/completions") -> dict[str, float]:
    """Send one prompt of 8 MB of repeated text, and return figures as ``measure_body``."""
    prompt = text * (PROMPT_BYTES // len(json.dumps(text)[1:-1]))
    content = {"messages": [{"role": "user", "content": prompt}]}
    return measure_body(content if path.startswith("/chat") else {"prompt": prompt}, path=path)


def measure_body(body: object, *, path: str = "/chat/completions") -> dict[str, float]:
    """Send one request, which must be refused, and return figures in ms.

    Returns:
        ``loop_stall_ms``: the longest /health while it is read; ``baseline_ms``: the longest
            before; ``answer_ms``.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "corpus.txt").write_text("some words of a small vocabulary, and   spaces\n" * 50)
        _write_tokenizer(folder, TinyModel(vocab="bpe", corpus=str(folder / "corpus.txt")))
        command = [sys.executable, "-m", "bench.support.long_prompt", str(folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                port = int(server.stdout.readline().rpartition(":")[2].partition("/")[0])
                return _measure(port, path, json.dumps(body).encode())
            finally:
                server.kill()


def _measure(port: int, path: str, body: bytes) -> dict[str, float]:
    baseline = max(_health_ms(port) for _ in range(BASELINE))
    answer: list[tuple[int, float]] = []
    sender = threading.Thread(target=lambda: answer.append(_post(port, path, body)))
    sender.start()
    stall = 0.0
    while sender.is_alive():
        stall = max(stall, _health_ms(port))
        time.sleep(POLL_S)
    ((status, answer_ms),) = answer
    assert status == 400, status
    return {
        "loop_stall_ms": round(stall, 1),
        "baseline_ms": round(baseline, 1),
        "answer_ms": round(answer_ms, 1),
    }


def _health_ms(port: int) -> float:
    began = time.perf_counter()
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=120)) as connection:
        connection.request("GET", "/health")
        response = connection.getresponse()
        response.read()
    assert response.status == 200
    return (time.perf_counter() - began) * 1000


def _post(port: int, path: str, body: bytes) -> tuple[int, float]:
    began = time.perf_counter()
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=600)) as connection:
        connection.request("POST", f"/v1{path}", body, headers)
        response = connection.getresponse()
        response.read()
    return response.status, (time.perf_counter() - began) * 1000


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(_serve(Path(sys.argv[1])))
    else:
        print(json.dumps({name: measure(text) for name, text in TEXTS.items()}))
