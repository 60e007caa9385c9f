"""Compare a rollout server, asked as hubs ask it, with the bare engine: the same requests,
alternating.

    python -m bench.server [--pairs 15] [--starts 5] [--requests 64] [--only hf,http,vllm] [--ahead]

The server is the real process, joined to a run on a private nats-server and asked over ZeroMQ, or
for ``http`` by as many streams of its OpenAI-compatible API with a chunk for each token, with the
engine hf; this process plays the hubs. The bare engine is a process with nothing else, HFEngine or
AsyncLLM; all requests at once, greedy, with the logprob of every token. Both processes are
restarted after every third pair: where the memory of a process happens to lie changes its speed by
some percent as long as it lives. ``vllm`` is measured by .venv-vllm/bin/python (``make vllm-env``)
if this interpreter has no vLLM.

``ratio_*``: tokens per second of the server / of the bare engine, the median over the pairs; null
with the reason in ``why_vllm`` if there is no vLLM. ``interval_*`` holds the median of the
population with at least 95 % probability, from the order statistics. ``identical_tokens``: whether
both gave the same tokens to every request of every pair. A pair during which other processes took
more than ``--others`` of the processors is repeated, as often as there are pairs; if too few
remain, the disturbed ones count, too. ``others_share`` is the median of what they took. The last
line is one JSON object.
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
from collections.abc import AsyncIterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from bench.engine import Requests, make_model, make_requests
from bench.support.other_load import OtherLoad, take_priority
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
        command = [
            sys.executable,
            "-m",
            "bench.support.server_bare",
            engine,
            str(folder),
            str(threads),
        ]
        log.parent.mkdir(exist_ok=True)
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
        self.client = client
        self.address = address
        self.bus = bus
        self.roster = roster

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
    """Yield a rollout server with constant weights, or one without prefix cache that waits for a
    learner's.
    """
    http = getattr(options, "http", False)
    rollout = {
        "max_running": options.requests,
        "max_context_tokens": CONTEXT,
        "num_threads": options.threads,
    }
    rollout |= {"http_port": 0} if http else {}
    rollout |= {} if frozen else {"prefix_cache": False}
    with BrokerServer(str(folder / f"broker-{engine}")) as broker:
        bus = await Bus.connect(broker.url, RUN, name="bench", deadline_s=20)
        await bus.ensure_streams()
        domain = {"env": "frozenlake", "max_context_tokens": 128, "sampling": {"max_tokens": 4}}
        config = runspec.validate({"rollout": rollout, "domains": {"lake": domain}})
        spec = wire.RunSpec(
            run=RUN, wire_version=wire.WIRE_VERSION, epoch=0, config=config, model_path=str(model)
        )
        await runspec.publish_runspec(bus, spec)
        roster = Roster(bus)
        client = carriers.make_client("zmq", bus)
        await roster.start()
        command = [
            sys.executable,
            "-m",
            "rollout.cli",
            "--broker",
            broker.url,
            "--run",
            RUN,
            "--id",
            "server",
        ]
        command += ["--gpus", "cpu"]
        command += [
            "--engine",
            engine,
            *(["--policy", "baseline", "--model", str(model)] if frozen else []),
        ]
        log = folder / f"server-{engine}.log"
        with log.open("ab") as said:
            process = spawn(command, said, env={**os.environ, "RL_API_KEY": KEY} if http else None)
        try:
            async with asyncio.timeout(START_S):
                while (
                    (seen := roster.get("server")) is None
                    or not seen.address
                    or (frozen and seen.state != "serving")
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


class Pairs:
    """Alternating runs of one server and its bare engine, until enough of them were quiet.

    Args:
        most: quiet pairs to measure.
        others: share of the processors that other processes may take during a quiet pair.
    """

    def __init__(self, most: int, others: float) -> None:
        self._most = most
        self._others = others
        self._quiet: list[tuple[float, float]] = []  # ratio and share of other processes
        self._disturbed: list[tuple[float, float]] = []

    def __bool__(self) -> bool:
        """Return whether another pair is needed."""
        return len(self._quiet) < self._most and len(self._disturbed) < self._most

    def add(self, ratio: float, share: float) -> bool:
        """Add a pair, and return whether it was quiet."""
        (self._disturbed if share > self._others else self._quiet).append((ratio, share))
        return share <= self._others

    def counting(self) -> list[tuple[float, float]]:
        """Return ratios and shares of those that count: the quiet ones, or all if too few were
        quiet.
        """
        return self._quiet if len(self._quiet) >= self._most else self._quiet + self._disturbed


async def compare(
    measured: str, model: Path, folder: Path, requests: Requests, options: argparse.Namespace
) -> dict[str, Any]:
    """Return the figures of ``hf``, ``http`` or ``vllm``."""
    (folder / "requests.json").write_text(json.dumps(requests))
    options = argparse.Namespace(**vars(options), http=measured == "http")
    pairs = Pairs(options.pairs, options.others)
    identical = True
    start = 0
    while pairs:
        start += 1
        identical &= await compare_once(
            measured, model, folder / str(start), requests, options, pairs
        )
    ratios, shares = zip(*pairs.counting(), strict=True)
    return {
        f"ratio_{measured}": round(median(ratios), 3),
        f"interval_{measured}": [round(bound, 3) for bound in interval(ratios)],
        f"pairs_{measured}": len(ratios),
        f"others_share_{measured}": round(median(shares), 3),
        f"identical_tokens_{measured}": identical,
    }


async def compare_once(
    measured: str,
    model: Path,
    folder: Path,
    requests: Requests,
    options: argparse.Namespace,
    pairs: Pairs,
) -> bool:
    """Start both processes, and add the pairs of one start; return whether all their tokens were
    the same.
    """
    engine = "vllm" if measured == "vllm" else "hf"
    tokens = sum(n for _, n in requests)
    identical = True
    bare = BareEngine(engine, model, options.threads, folder / f"bare-{engine}.log")
    try:
        async with serving(engine, model, folder, options) as server:
            await bare.line()
            if options.ahead:
                take_priority()
            asking = StreamedServer(folder / f"server-{engine}.log") if options.http else server
            for turn in range(options.warm_up + -(-options.pairs // options.starts)):
                new = asked(requests, str(turn))
                others = OtherLoad()
                if turn % 2:
                    plain = await bare.run()
                    whole = await asking.run(new)
                else:
                    whole = await asking.run(new)
                    plain = await bare.run()
                share = others.share()
                same = plain[1] == whole[1]
                ratio = plain[0] / whole[0]
                identical &= same
                verdict = "warm-up"
                if turn >= options.warm_up:
                    verdict = "counts" if pairs.add(ratio, share) else "disturbed"
                chunks = (
                    f"  {tokens / asking.chunks:.2f} tokens a chunk"
                    if isinstance(asking, StreamedServer)
                    else ""
                )
                rates = f"bare {tokens / plain[0]:.0f}  server {tokens / whole[0]:.0f} tokens/s"
                print(
                    f"{measured}  {rates}  {ratio:.3f}  same {same}{chunks}  others {share:.2f}  {verdict}",
                    flush=True,
                )
    finally:
        bare.close()
    return identical


def elsewhere(arguments: Sequence[str]) -> dict[str, Any]:
    """Measure vLLM by the interpreter that has it."""
    program = Path(__file__).resolve().parents[1] / ".venv-vllm/bin/python"
    if not program.exists():
        return {"ratio_vllm": None, "why_vllm": "vLLM is not installed; make vllm-env"}
    command = [str(program), "-m", "bench.server", *arguments, "--only", "vllm"]
    print(f"vllm by {program}", flush=True)
    found = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=False, timeout=3 * START_S
    )
    lines = found.stdout.splitlines()
    print("\n".join(lines[:-1]), flush=True)
    if found.returncode or not lines:
        return {"ratio_vllm": None, "why_vllm": f"its benchmark exited with {found.returncode}"}
    figures: dict[str, Any] = json.loads(lines[-1])
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--pairs", type=int, default=15)
    add("--starts", type=int, default=5, help="of both processes, with as many pairs each")
    add("--warm-up", type=int, default=2, help="pairs after each start that do not count")
    add("--requests", type=int, default=64)
    add("--hidden", type=int, default=256)
    add("--layers", type=int, default=4)
    add("--threads", type=int, default=1)
    add("--only", default="hf,http,vllm", help="what to measure")
    add("--others", type=float, default=0.25)
    add(
        "--ahead",
        action="store_true",
        help="run ahead of other processes, and count all pairs (root)",
    )
    options = parser.parse_args(given)
    options.others = 1.0 if options.ahead else options.others
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="rlearner-bench-") as name:
        for measured in options.only.split(","):
            if measured == "vllm" and find_spec("vllm") is None:
                figures |= elsewhere(given)
                continue
            folder = Path(name) / measured
            vocab_size = make_model(str(folder / "model"), options.hidden, options.layers)
            if measured == "http":
                add_tokenizer(folder / "model")
            requests = make_requests(options.requests, vocab_size)
            figures |= asyncio.run(compare(measured, folder / "model", folder, requests, options))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
