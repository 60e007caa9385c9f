"""Measure what a tool call over MCP adds to the tool, and the speed and recall of the retriever.

    python -m bench.tools [--calls 300] [--vectors 100000] [--queries 1000]

Both ends of a call take their processor time on this machine. The tool itself, an addition, takes
microseconds, so the median of a call is what the way to it costs: mcp_call_ms by stdio,
mcp_http_call_ms by streamable HTTP, both from a server of the package mcp; function_call_ms is that
of a Python function. The vectors stand in clusters, as those of texts do; queries are drawn near
vectors. Index and queries run on one core, without an encoder; recall_at_10 compares with exact
search. The last line is one JSON object with these, retriever_qps, recall_at_10, build_s,
exact_qps, vectors and load (of the machine, before).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import numpy as np

from envhub.envs.retrieval.indexes import ExactIndex, GraphIndex, Vectors
from envhub.envs.tool_sources.base import ToolSource
from envhub.envs.tool_sources.functions import FunctionArgs, FunctionSource
from envhub.envs.tool_sources.mcp.source import McpArgs, McpSource

SERVER: Final = """
import sys
from mcp.server.mcpserver import MCPServer

server = MCPServer("sums", log_level="WARNING")

@server.tool()
def add(a: int, b: int) -> int:
    return a + b

if sys.argv[1:]:
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
else:
    server.run("stdio")
"""
FUNCTION: Final = "def add(a: int, b: int) -> int:\n    return a + b\n"
DIMENSIONS: Final = 384
CLUSTERS: Final = 1000
# standard deviation within a cluster, whose centres have length 1
SPREAD: Final = 0.03
NEAREST: Final = 10
WARM_UP: Final = 20
START_S: Final = 120.0


async def time_calls(source: ToolSource, calls: int) -> float:
    """Return the median of a call, in milliseconds."""
    await source.open()
    try:
        durations = []
        for number in range(-WARM_UP, calls):
            began = time.perf_counter()
            result = await source.call("add", {"a": number, "b": 1}, START_S)
            if number >= 0:
                durations.append(1e3 * (time.perf_counter() - began))
            if result.text != str(number + 1):
                raise RuntimeError(f"the tool answered {result.text!r}")
        return round(statistics.median(durations), 3)
    finally:
        await source.close()


def measure_calls(folder: Path, calls: int) -> dict[str, float]:
    """Return the median of a call by each kind of source."""
    server = folder / "server.py"
    server.write_text(SERVER, encoding="utf-8")
    functions = folder / "functions.py"
    functions.write_text(FUNCTION, encoding="utf-8")
    command = [sys.executable, str(server)]
    stdio = McpSource("stdio", McpArgs(command=command, start_timeout_s=START_S))
    figures = {"mcp_call_ms": asyncio.run(time_calls(stdio, calls))}
    port = free_port()
    with subprocess.Popen([*command, str(port)], stderr=subprocess.DEVNULL) as child:
        try:
            wait_for_port(port)
            http = McpSource("http", McpArgs(url=f"http://127.0.0.1:{port}/mcp"))
            figures["mcp_http_call_ms"] = asyncio.run(time_calls(http, calls))
        finally:
            child.kill()
    source = FunctionSource("f", FunctionArgs(functions=[f"{functions}:add"]))
    figures["function_call_ms"] = asyncio.run(time_calls(source, calls))
    return figures


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_for_port(port: int) -> None:
    """Wait until a server accepts connections."""
    until = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def clustered(count: int, rng: np.random.Generator, centres: Vectors) -> Vectors:
    """Return vectors (count, dimensions) of length 1 around random centres."""
    chosen = centres[rng.integers(len(centres), size=count)]
    noise = rng.normal(scale=SPREAD, size=chosen.shape).astype(np.float32)
    vectors = chosen + noise
    unit: Vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit


def measure_retriever(num_vectors: int, num_queries: int) -> dict[str, float]:
    """Return speed and recall of the graph, and the speed of exact search."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(CLUSTERS, DIMENSIONS)).astype(np.float32)
    centres /= np.linalg.norm(centres, axis=1, keepdims=True)
    vectors = clustered(num_vectors, rng, centres)
    queries = clustered(num_queries, rng, centres)
    began = time.perf_counter()
    graph = GraphIndex.build(vectors)
    build_s = time.perf_counter() - began
    began = time.perf_counter()
    positions, _ = graph.search(queries, NEAREST)
    qps = num_queries / (time.perf_counter() - began)
    began = time.perf_counter()
    exact, _ = ExactIndex(vectors).search(queries, NEAREST)
    exact_qps = num_queries / (time.perf_counter() - began)
    shared = sum(
        len(set(row) & set(exact_row)) for row, exact_row in zip(positions, exact, strict=True)
    )
    return {
        "retriever_qps": round(qps, 1),
        "recall_at_10": round(shared / exact.size, 4),
        "build_s": round(build_s, 1),
        "exact_qps": round(exact_qps, 1),
        "vectors": num_vectors,
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--calls", type=int, default=300, help="of each kind (%(default)s)")
    parser.add_argument("--vectors", type=int, default=100_000, help="(%(default)s)")
    parser.add_argument("--queries", type=int, default=1000, help="(%(default)s)")
    options = parser.parse_args()
    load = round(os.getloadavg()[0], 2)
    # one core: numpy must not use more for the exact search
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    figures = measure_retriever(options.vectors, options.queries)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    with tempfile.TemporaryDirectory() as name:
        figures |= measure_calls(Path(name), options.calls)
    print(json.dumps({**figures, "load": load}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
