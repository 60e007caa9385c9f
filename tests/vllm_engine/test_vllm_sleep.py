"""vLLM that sleeps: requests wait and go on, new weights go in afterwards. Its CPU build frees no
memory.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

import hf_models as models
from vllm_kit import assert_logprobs, in_flight, prompt, renewed

from broker.errors import UserError
from rollout.engines.args import VLLMArgs
from rollout.engines.base import EngineConfig, SleepingEngine
from rollout.engines.vllm.startup import uses_cpu

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_requests_wait_and_go_on_with_kv_that_is_read_again(make: Any, folder: Path) -> None:
    engine, model, context = await make(), models.load(folder), prompt(12)
    assert isinstance(engine, SleepingEngine)
    running = await in_flight(engine, context)
    await engine.sleep()
    sampled = engine.stats().generated_tokens
    late = asyncio.create_task(engine.generate(models.request("late", context, max_tokens=3)))
    gone = asyncio.create_task(engine.generate(models.request("gone", context, max_tokens=3)))
    await asyncio.sleep(0.3)
    assert engine.stats().generated_tokens == sampled
    engine.abort("gone")
    assert (await asyncio.wait_for(gone, 60)).finish_reason == "abort"
    assert not late.done()
    assert not running.done()
    await engine.wake()
    for output in await asyncio.wait_for(asyncio.gather(running, late), 60):
        assert output.finish_reason == "length"
        assert [version for version, _ in output.version_runs] == [0]
        assert_logprobs(model, context, output)
    other, tensors = renewed(folder)
    await engine.sleep()
    await engine.wake()
    await engine.update_weights(tensors, 1, "recompute", None)
    assert_logprobs(other, context, await engine.generate(models.request("new", context)))


async def test_the_cpu_build_takes_no_turns(folder: Path) -> None:
    config = EngineConfig(str(folder), device="cpu", shares_device=True)
    with pytest.raises(
        UserError, match=r"^--share-gpus: vLLM does not free its memory on a CPU; use engine hf$"
    ):
        uses_cpu(config, VLLMArgs())
