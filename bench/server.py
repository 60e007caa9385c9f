"""Compare a rollout server, asked as hubs ask it, with the bare engine: the same requests, alternating.

    python -m bench.server [--pairs 9] [--requests 64] [--engines vllm,hf] [--http]

Without ``--engines`` it measures those that are installed; vllm is after ``make vllm-env``, in .venv-vllm/bin/python.

The server is the real process, joined to a run on a private nats-server and asked over ZeroMQ, or with ``--http`` by as
many streams of its OpenAI-compatible API with a chunk for each token; this process plays the hubs. The bare engine is a
process with nothing else, AsyncLLM or HFEngine; all requests at once, greedy, with the logprob of every token.
``ratio_vllm``, ``ratio_hf``: tokens per second of the server / of the bare engine, the median over the pairs;
``*_interval`` holds the median of the population with at least 95 % probability, from the order statistics.
``identical_tokens``: whether both gave the same tokens to every request of every pair. A pair during which other
processes took more than ``--others`` of the processors is repeated; ``others_share`` is the median of what they took.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

from bench.engine import Requests, make_model, make_requests, measurable
from bench.support.other_load import NEVER_QUIET, OtherLoad
from bench.support.paired import interval, median
from bench.support.server_bare import asked
from bench.support.server_http import KEY, StreamedServer, add_tokenizer
from broker.channel import carriers
from broker.channel.carriers import ChannelClient
from broker.contract import wire
from broker.jetstream.bus import Bus
from broker.runtime.presence import Roster
from broker.server.private_server import BrokerServer
from broker.settings import runspec
from broker.system.children import spawn
from broker.system.entry import EXIT_USER_ERROR

START_S: Final = 600.0
CONTEXT: Final = 512
RUN: Final = "bench-server"


class BareEngine:
    """``bench.support.server_bare`` in a process of its own, driven by lines."""

    def __init__(self, engine: str, folder: Path, threads: int, log: Path) -> None:
        command = [sys.executable, "-m", "bench.support.server_bare", engine, str(folder), str(threads)]
        read, write = os.pipe()
        self._commands = os.fdopen(write, "wb", buffering=0)
        answers, out = os.pipe()
        self._answers = os.fdopen(answers, "rb")
        with log.open("ab") as said, os.fdopen(out, "wb") as output:
            self._process = spawn(command, output, errors=said, stdin=read)
        os.close(read)

    async def line(self) -> Any:
        while True:
            text = await asyncio.to_thread(self._answers.readline)
            if not text:
                raise RuntimeError("the bare engine ended; see its log")
            if text.startswith(b"{"):  # libraries print, too
                return json.loads(text)

    async def run(self) -> tuple[float, list[list[int]]]:
        self._commands.write(b"go\n")
        answer = await self.line()
        return answer["seconds"], answer["tokens"]

    def close(self) -> None:
        self._commands.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class ServedEngine:
    """A rollout server in a process of its own, and a client that asks it."""

    def __init__(self, client: ChannelClient, address: str, bus: Bus, roster: Roster) -> None:
        self.client, self.address, self.bus, self.roster = client, address, bus, roster

    async def run(self, requests: list[wire.GenerateRequest]) -> tuple[float, list[list[int]]]:
        began = time.perf_counter()
        replies = await asyncio.gather(
            *(self.client.generate(self.address, request, timeout_s=600) for request in requests)
        )
        seconds = time.perf_counter() - began
        for reply, request in zip(replies, requests, strict=True):
            if reply.error or len(reply.logprobs.array()) != request.sampling.max_tokens:
                raise RuntimeError(f"{request.request_id}: {reply.error or 'too few tokens'}")
        return seconds, [reply.token_ids.array().tolist() for reply in replies]


@contextlib.asynccontextmanager
async def serving(
    engine: str, model: Path, folder: Path, options: argparse.Namespace, *, frozen: bool = True
) -> AsyncIterator[ServedEngine]:
    """Yield a rollout server with constant weights, or one without prefix cache that waits for a learner's."""
    http = getattr(options, "http", False)
    rollout = {"max_running": options.requests, "max_context_tokens": CONTEXT, "num_threads": options.threads}
    rollout |= {"http_port": 0} if http else {}
    rollout |= {} if frozen else {"prefix_cache": False}
    with BrokerServer(str(folder / f"broker-{engine}")) as broker:
        bus = await Bus.connect(broker.url, RUN, name="bench", deadline_s=20)
        await bus.ensure_streams()
        domain = {"env": "frozenlake", "max_context_tokens": 128, "sampling": {"max_tokens": 4}}
        config = runspec.validate({"rollout": rollout, "domains": {"lake": domain}})
        spec = wire.RunSpec(run=RUN, wire_version=wire.WIRE_VERSION, epoch=0, config=config, model_path=str(model))
        await runspec.publish_runspec(bus, spec)
        roster, client = Roster(bus), carriers.connect("zmq", bus)
        await roster.start()
        command = [sys.executable, "-m", "rollout.cli", "--broker", broker.url, "--run", RUN, "--id", "server"]
        command += ["--gpus", "cpu"]
        command += ["--engine", engine, *(["--policy", "baseline", "--model", str(model)] if frozen else [])]
        log = folder / f"server-{engine}.log"
        with log.open("ab") as said:
            process = spawn(command, said, env={**os.environ, "RL_API_KEY": KEY} if http else None)
        try:
            async with asyncio.timeout(START_S):
                while (
                    (seen := roster.get("server")) is None or not seen.address or (frozen and seen.state != "serving")
                ):
                    if process.poll() is not None:
                        words = log.read_text(errors="replace")
                        if process.returncode == EXIT_USER_ERROR:
                            raise SystemExit(words.splitlines()[-1])
                        raise RuntimeError(words[-2000:])
                    await roster.changed(0.5)
            yield ServedEngine(client, seen.address, bus, roster)
        finally:
            process.terminate()
            process.wait(60)
            await client.close()
            await roster.close()
            await bus.close()


async def compare(
    engine: str, model: Path, folder: Path, requests: Requests, options: argparse.Namespace
) -> tuple[list[float], bool, list[float]]:
    """Return ratios of the alternating pairs, whether all tokens were equal, and the share of other load."""
    ratios: list[float] = []
    shares: list[float] = []
    identical = True
    (folder / "requests.json").write_text(json.dumps(requests))
    bare = BareEngine(engine, model, options.threads, folder / f"bare-{engine}.log")
    try:
        async with serving(engine, model, folder, options) as server:
            await bare.line()
            asking = StreamedServer(folder / f"server-{engine}.log") if options.http else server
            turn = disturbed = 0
            while len(ratios) < options.pairs and disturbed <= 2 * options.pairs:
                new, others = asked(requests, str(turn)), OtherLoad()
                if turn % 2:
                    plain, whole = await bare.run(), await asking.run(new)
                else:
                    whole, plain = await asking.run(new), await bare.run()
                share = others.share()
                tokens = sum(length for _, length in requests)
                same = plain[1] == whole[1]
                verdict = "disturbed, does not count" if share > options.others else "counts"
                verdict = "warm-up" if turn < options.warm_up else verdict
                ratio = plain[0] / whole[0]
                chunks = f"  {tokens / asking.chunks:.2f} tokens a chunk" if isinstance(asking, StreamedServer) else ""
                rates = f"bare {tokens / plain[0]:.0f}  server {tokens / whole[0]:.0f} tokens/s"
                print(f"{engine}  {rates}  {ratio:.3f}  same {same}{chunks}  others {share:.2f}  {verdict}", flush=True)
                if verdict == "counts":
                    ratios.append(ratio)
                    shares.append(share)
                disturbed += verdict.startswith("disturbed")
                identical &= same
                turn += 1
    finally:
        bare.close()
    return ratios, identical, shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--pairs", type=int, default=9)
    add("--warm-up", type=int, default=2)
    add("--requests", type=int, default=64)
    add("--hidden", type=int, default=256)
    add("--layers", type=int, default=4)
    add("--threads", type=int, default=1)
    add("--engines", default=",".join(measurable()), help="those that are installed, of vllm and hf")
    add("--http", action="store_true")
    add("--others", type=float, default=0.25)
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    same = True
    with tempfile.TemporaryDirectory(prefix="rlearner-bench-") as name:
        folder = Path(name)
        vocab_size = make_model(str(folder / "model"), options.hidden, options.layers)
        if options.http:
            add_tokenizer(folder / "model")
        requests = make_requests(options.requests, vocab_size)
        for engine in options.engines.split(","):
            ratios, identical, shares = asyncio.run(compare(engine, folder / "model", folder, requests, options))
            same &= identical
            if not ratios:
                raise SystemExit(NEVER_QUIET)
            figures[f"pairs_{engine}"] = len(ratios)
            figures["others_share"] = round(median(shares), 3)
            figures[f"ratio_{engine}"] = round(median(ratios), 3)
            figures[f"ratio_{engine}_interval"] = [round(bound, 3) for bound in interval(ratios)]
    print(json.dumps({**figures, "identical_tokens": same}))


if __name__ == "__main__":
    main()
