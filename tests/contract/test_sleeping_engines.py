"""Engines that leave their device to another process: memory, requests in flight, weights
afterwards.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from engine_kit import TINY, ask
from safetensors.torch import load_file
from sglang_double import Double, double
from waits import LONG_S, until

from broker.contract import wire
from broker.weights.memory.offload import return_freed_memory
from rlearner_text.config import TinyModel
from rlearner_text.tiny import build_tiny
from rollout.config import RolloutSection
from rollout.engines.base import EngineConfig, SleepingEngine
from rollout.engines.hf.engine import HFEngine
from rollout.engines.openai import OpenAIEngine
from rollout.engines.random import RandomEngine
from rollout.engines.sglang.engine import SGLangEngine
from rollout.request_handler import RequestHandler

LENGTH = 90
Sleeper = HFEngine | SGLangEngine


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_tiny(tmp_path_factory.mktemp("sleeping") / "model", TINY))


def config(path: str, **section: Any) -> EngineConfig:
    settings = RolloutSection(max_running=4, max_context_tokens=128, num_threads=1, **section)
    return EngineConfig(path, settings, device="cpu", policy_version=0, shares_device=True)


@pytest.fixture
async def server() -> AsyncIterator[Double]:
    async with double() as made:
        yield made


@pytest.fixture(params=["hf", "sglang"])
async def engine(
    request: pytest.FixtureRequest, model_path: str, server: Double
) -> AsyncIterator[Sleeper]:
    made: Sleeper
    if request.param == "hf":
        made = HFEngine(config(model_path))
    else:
        made = SGLangEngine(
            config(model_path, engine="sglang", engine_args={"command": server.command})
        )
    await made.start()
    yield made
    await made.close()


async def started(engine: Sleeper) -> None:
    """Wait until requests have tokens."""
    before = engine.stats().generated_tokens
    await until(
        lambda: engine.stats().running and (engine.stats().generated_tokens > before or before == 0)
    )


async def test_requests_in_flight_go_on_with_the_tokens_that_they_would_have_had(
    engine: Sleeper,
) -> None:
    expected = await engine.generate(ask("alone", max_tokens=LENGTH, temperature=0))
    running = [
        asyncio.create_task(engine.generate(ask(f"r{i}", max_tokens=LENGTH, temperature=0)))
        for i in range(6)
    ]
    await started(engine)
    for first in (True, False):
        await engine.sleep()
        sampled = engine.stats().generated_tokens
        late = asyncio.create_task(engine.generate(ask(f"late{sampled}", max_tokens=3)))
        await asyncio.sleep(0.2)
        assert engine.stats().generated_tokens == sampled
        assert not late.done()
        # those that waited wait on; between the two they start, and may end before a busy machine
        # sleeps again
        assert not first or not any(task.done() for task in running[4:])
        await engine.wake()
        assert (await asyncio.wait_for(late, LONG_S)).error == ""
    for output in await asyncio.wait_for(asyncio.gather(*running), LONG_S):
        assert list(output.token_ids) == list(expected.token_ids)
        assert np.allclose(output.logprobs, expected.logprobs, atol=1e-4)
        assert list(output.version_runs) == [(0, LENGTH)]


async def test_aborts_and_deadlines_end_requests_of_an_engine_that_sleeps(engine: Sleeper) -> None:
    aborted = asyncio.create_task(engine.generate(ask("aborted", max_tokens=LENGTH)))
    expired = asyncio.create_task(
        engine.generate(ask("expired", max_tokens=LENGTH, deadline_s=1.0))
    )
    await started(engine)
    await engine.sleep()
    waits = asyncio.create_task(engine.generate(ask("waits", deadline_s=0.2)))
    engine.abort("aborted")
    done = await asyncio.wait_for(asyncio.gather(aborted, expired, waits), LONG_S)
    assert [output.finish_reason for output in done] == ["abort", "deadline", "deadline"]
    await engine.wake()
    assert (await engine.generate(ask("after"))).finish_reason == "length"
    assert (engine.stats().running, engine.stats().waiting) == (0, 0)


async def test_new_weights_go_in_after_waking(engine: Sleeper, model_path: str) -> None:
    before = await engine.logprobs([10, 11, 12, 13])
    new = {
        name: tensor * 1.5
        for name, tensor in load_file(Path(model_path) / "model.safetensors").items()
    }
    held = {name: new[name] for name in engine.weights()}
    for version in (1, 2):
        await engine.sleep()
        await engine.wake()
        if version == 1:
            assert np.array_equal(await engine.logprobs([10, 11, 12, 13]), before)
        await engine.update_weights(held, version, "recompute", None)
        after = await engine.logprobs([10, 11, 12, 13])
        assert np.abs(after - before).max() > 1e-3
    await engine.sleep()
    await engine.wake()
    assert np.array_equal(await engine.logprobs([10, 11, 12, 13]), after)
    assert engine.policy_version == 2


async def test_contexts_are_scored_once_it_is_awake(engine: Sleeper) -> None:
    handler = RequestHandler(engine, "s1", lambda _: None)
    scored = await handler.handle(_score("first"))
    await handler.hold_scores()
    await engine.sleep()
    waiting = asyncio.create_task(handler.handle(_score("second")))
    dropped = asyncio.create_task(handler.handle(_score("third", deadline_s=0.1)))
    assert (await asyncio.wait_for(dropped, LONG_S)).finish_reason == "deadline"
    assert not waiting.done()
    await engine.wake()
    handler.release_scores()
    again = await asyncio.wait_for(waiting, LONG_S)
    assert again.top_ids is not None
    assert again.top_ids == scored.top_ids


def _score(name: str, **more: Any) -> wire.GenerateRequest:
    return msgspec.structs.replace(ask(name, **more), prompt_top_k=2)


async def test_the_memory_of_weights_and_slots_is_the_systems_meanwhile(tmp_path: Path) -> None:
    size = TinyModel(
        hidden_size=512,
        num_layers=8,
        num_heads=8,
        num_kv_heads=8,
        head_dim=64,
        intermediate_size=2048,
    )
    path = str(build_tiny(tmp_path / "model", size))
    # what its start loads into the process for good is not of the weights
    first = HFEngine(config(path))
    await first.start()
    await asyncio.gather(*(first.generate(ask(f"first-{i}", max_tokens=100)) for i in range(4)))
    await first.close()
    del first
    engine = HFEngine(config(path))
    gc.collect()
    return_freed_memory()
    empty = anonymous()
    await engine.start()
    await engine.sleep()  # the first weights are mapped from their file
    await engine.wake()
    await asyncio.gather(*(engine.generate(ask(f"r{i}", max_tokens=100)) for i in range(4)))
    awake = anonymous() - empty
    assert awake > 100 << 20
    await engine.sleep()
    # weights are nine tenths; freed memory between used pieces stays
    assert anonymous() - empty < 0.35 * awake
    await engine.wake()
    assert (await engine.generate(ask("after"))).error == ""
    await engine.close()


def anonymous() -> int:
    """Return this process's resident bytes that are not of files."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def test_engines_without_a_device_cannot_sleep() -> None:
    assert not any(issubclass(kind, SleepingEngine) for kind in (OpenAIEngine, RandomEngine))
    assert all(issubclass(kind, SleepingEngine) for kind in (HFEngine, SGLangEngine))
