"""Requests for an engine, sent to it directly or through a rollout server."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from broker.channel import carriers
from broker.contract import wire
from broker.errors import UserError
from broker.jetstream.bus import Bus
from broker.runtime.presence import Roster
from broker.server.private_server import BrokerServer
from broker.settings import runspec
from broker.settings.registry import resolve
from broker.system.children import spawn
from rollout.config import RolloutSection
from rollout.engines import ENGINES
from rollout.engines.base import Engine, EngineConfig

START_S: Final = 900.0  # an engine may compile
POLICY: Final = "bench"  # no learner is there whose weights it could follow

Ask = Callable[[wire.GenerateRequest], Awaitable[Any]]


def make_requests(
    number: int,
    vocab: int,
    *,
    prompt: tuple[int, int],
    output: tuple[int, int],
    temperature: float,
    name: str = "r",
    seed: int = 0,
) -> list[wire.GenerateRequest]:
    """Random prompts and fixed output lengths, both between two bounds; the same seed gives the
    same ones.
    """
    rng = np.random.default_rng(seed)
    made = []
    for index in range(number):
        ids = rng.integers(3, vocab, rng.integers(prompt[0], prompt[1] + 1))
        sampling = wire.SamplingParams(
            max_tokens=int(rng.integers(output[0], output[1] + 1)),
            temperature=temperature,
            ignore_eos=True,
            seed=index,
        )
        made.append(
            wire.GenerateRequest(
                request_id=f"{name}-{index}",
                conversation_id=f"{name}-{index}",
                token_ids=wire.column(ids, "<i4"),
                sampling=sampling,
                deadline_s=START_S,
            )
        )
    return made


KV_GIB: Final = 30.0  # of engine hf on a GPU, which may hold two engines


def section(options: argparse.Namespace, number: int, context: int) -> RolloutSection:
    """Return the settings of an engine; prompts are random, so that a prefix cache finds nothing."""
    args = dict(options.engine_args)
    if options.engine == "hf" and not options.tiny:
        args.setdefault("kv_cache_gib", KV_GIB)
    return RolloutSection(
        engine=options.engine, engine_args=args, max_running=number, max_context_tokens=context, prefix_cache=False,
        prefill_tokens=16384, policy=POLICY,
    )  # fmt: skip


@asynccontextmanager
async def bare(
    options: argparse.Namespace, model: str, settings: RolloutSection, dtype: str
) -> AsyncIterator[Engine]:
    """Yield the engine in this process, ready for requests."""
    device = "cpu" if options.device == "cpu" else "cuda"
    engine: Engine = resolve("engines", options.engine, ENGINES)(
        EngineConfig(model, settings, dtype, device=device, policy_version=0)  # type: ignore[arg-type]
    )
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


@asynccontextmanager
async def served(
    options: argparse.Namespace, model: str, settings: RolloutSection, dtype: str
) -> AsyncIterator[Ask]:
    """Yield a function that sends requests to a rollout server; raise UserError if the server does
    not start.
    """
    with tempfile.TemporaryDirectory() as folder, BrokerServer(folder + "/broker") as broker:
        bus = await Bus.connect(broker.url, "bench-gpu", name="bench", deadline_s=30.0)
        await bus.ensure_streams()
        domains = {
            "lake": {"env": "frozenlake", "max_context_tokens": 32, "sampling": {"max_tokens": 4}}
        }
        rollout = settings.model_dump(mode="json") | {"policy": "actor"}
        config = runspec.validate(
            {"rollout": rollout, "model": {"dtype": dtype}, "domains": domains}
        )
        spec = wire.RunSpec(
            run="bench-gpu",
            wire_version=wire.WIRE_VERSION,
            epoch=0,
            config=config,
            model_path=model,
        )
        await runspec.publish_runspec(bus, spec)
        roster = Roster(bus)
        client = carriers.make_client("zmq", bus)
        await roster.start()
        log_path = Path(folder) / "server.log"
        gpus = "cpu" if options.device == "cpu" else "auto"
        command = [
            sys.executable,
            "-m",
            "rollout.cli",
            "--broker",
            broker.url,
            "--run",
            "bench-gpu",
            "--id",
            "bench-1",
        ]
        with log_path.open("wb") as log:
            environment = {**os.environ, "RL_RUN": "", "RL_BROKER": ""}
            child = spawn([*command, "--gpus", gpus, "--policy", POLICY], log, env=environment)
        try:
            async with asyncio.timeout(START_S):
                while (there := roster.get("bench-1")) is None or there.state != "serving":
                    if child.poll() is not None:
                        last = log_path.read_text(errors="replace").strip().splitlines()[-1]
                        raise UserError(f"the rollout server ended: {last}")
                    await roster.changed(0.5)
            address = there.address

            async def ask(request: wire.GenerateRequest) -> wire.GenerateReply:
                return await client.generate(address, request, timeout_s=START_S)

            yield ask
        finally:
            child.terminate()
            await asyncio.to_thread(child.wait)
            await client.close()
            await roster.close()
            await bus.close()


def tokens_of(output: Any) -> list[int]:
    found = output.token_ids
    return [int(token) for token in (found.array() if isinstance(found, wire.Column) else found)]


async def all_at_once(ask: Ask, requests: Sequence[wire.GenerateRequest]) -> list[list[int]]:
    """Return the tokens of each request; raise UserError if one failed."""
    outputs = await asyncio.gather(*(ask(request) for request in requests))
    if error := next((output.error for output in outputs if output.error), ""):
        raise UserError(f"a request ended with: {error}")
    return [tokens_of(output) for output in outputs]
